//! `vescale-plan`: plans how to shard LLM training, predicts its speed and memory, and says why.

mod args;
mod budget;
mod commands;
mod destinations;
mod error;
mod inputs;
mod memory;
mod origins;
mod output;
mod settings;
mod usage;

use std::process::ExitCode;

use clap::FromArgMatches;

fn main() -> ExitCode {
    memory::release();
    keep_on_past_the_file_size_limit();
    output::set_color(settings::color_of_words(args::words::given()));
    let settings = args::words::refuse_other_text().and_then(|()| settings::Settings::load());
    let code = match settings {
        Ok(settings) => run(&settings),
        Err(mistake) => failed(&error::CliError::Input(mistake), None),
    };
    output::ended(code)
}

/// Makes a write beyond the limit on a file's size (`ulimit -f`) an error, like one to a full disk; the signal would end the program without
/// a word.
fn keep_on_past_the_file_size_limit() {
    #[cfg(unix)]
    {
        let noticed = std::sync::Arc::default();
        // If the handler cannot be set, the signal ends the program as before.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, noticed);
    }
}

/// Reads the command line, with defaults from the settings, and does what it says.
fn run(settings: &settings::Settings) -> ExitCode {
    let command = settings.as_defaults_of(args::command());
    let parsed = command.try_get_matches().and_then(|matches| {
        let cli = args::Cli::from_arg_matches(&matches)?;
        Ok((cli, origins::on(&matches, settings)))
    });
    match parsed {
        Ok((cli, asked)) => {
            commands::run(cli, &asked, settings).unwrap_or_else(|e| failed(&e, Some(settings)))
        }
        Err(message) => usage::say(&message, settings),
    }
}

/// Tells why a command failed. A flag that `settings` set is told by its variable or file.
fn failed(error: &error::CliError, settings: Option<&settings::Settings>) -> ExitCode {
    if !matches!(error, error::CliError::Said(_)) {
        let mut mistake = error.mistake();
        let place = mistake.place.as_deref();
        let origin = place.and_then(|place| settings?.origin_of(place));
        mistake.place = origin.or(mistake.place);
        output::mistake(&mistake);
    }
    ExitCode::from(error.exit_code())
}
