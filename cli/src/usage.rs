//! Messages about the command line itself: help, version, and its mistakes, shown like all other mistakes.

use std::process::ExitCode;

use catalog::Mistake;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::args::examples;
use crate::output;
use crate::settings::Settings;

/// Prints help and version to stdout, mistakes to stderr.
pub(crate) fn say(message: &clap::Error, settings: &Settings) -> ExitCode {
    let help = message.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    let rendered = message.render();
    if message.exit_code() == 0 {
        output::document(&match output::style().colour {
            true => rendered.ansi().to_string(),
            false => rendered.to_string(),
        });
    } else if help {
        output::note(false, &rendered.to_string());
    } else {
        let mut mistake = wrong(message);
        let example = || examples::typed().to_owned();
        mistake.example.get_or_insert_with(example);
        let value = said(message, ContextKind::InvalidValue);
        let option = said(message, ContextKind::InvalidArg);
        if let (Some(value), Some(option)) = (value, option)
            && let Some(place) = settings.place_of(&option, &value)
        {
            mistake.place = Some(place);
        }
        output::mistake(&mistake);
    }
    ExitCode::from(message.exit_code() as u8)
}

/// The part of clap's message of this kind; several values are joined by commas.
fn said(message: &clap::Error, kind: ContextKind) -> Option<String> {
    match message.get(kind) {
        Some(ContextValue::Strings(all)) => Some(all.join(", ")),
        other => other.map(ContextValue::to_string),
    }
}

/// Turns clap's message about a wrong command line into a mistake.
fn wrong(message: &clap::Error) -> Mistake {
    let said = |kind| said(message, kind);
    let argument = said(ContextKind::InvalidArg).unwrap_or_default();
    match message.kind() {
        ErrorKind::ValueValidation | ErrorKind::InvalidValue => value(message, &argument),
        ErrorKind::UnknownArgument => Mistake::new(format!("unknown argument `{argument}`"))
            .at(examples::command())
            .expected("an option that --help lists")
            .nearest(said(ContextKind::SuggestedArg)),
        ErrorKind::InvalidSubcommand => {
            let name = said(ContextKind::InvalidSubcommand).unwrap_or_default();
            Mistake::new(format!("unknown command `{name}`"))
                .at(format!("vescale-plan {name}"))
                .expected("a command that `vescale-plan --help` lists")
                .nearest(said(ContextKind::SuggestedSubcommand))
        }
        ErrorKind::MissingRequiredArgument => Mistake::new(format!("{argument} is missing"))
            .at(examples::command())
            .expected("what --help lists as required"),
        ErrorKind::ArgumentConflict => {
            let flag = |kind| said(kind).unwrap_or_default();
            let (first, second) = (flag(ContextKind::InvalidArg), flag(ContextKind::PriorArg));
            let (what, expected) = match first == second {
                true => (format!("{first} is given twice"), "it once"),
                false => (format!("{first} contradicts {second}"), "one of them"),
            };
            (Mistake::new(what).at(examples::command())).expected(expected)
        }
        _ => {
            let text = message.render().to_string();
            let first = text.lines().next().unwrap_or_default();
            Mistake::new(first.trim_start_matches("error: "))
        }
    }
}

/// What clap's parser expected: a number, a range in words, or its own message.
fn expected(source: &(dyn std::error::Error + 'static)) -> String {
    if source.is::<std::num::ParseIntError>() {
        return "a whole number".to_owned();
    }
    if source.is::<std::num::ParseFloatError>() {
        return "a number".to_owned();
    }
    let said = source.to_string();
    range(&said).unwrap_or(said)
}

/// The range of a message such as `0 is not in 1..=9` of clap's parser of whole numbers, in words.
fn range(said: &str) -> Option<String> {
    let (_, range) = said.split_once(" is not in ")?;
    let (first, last) = range.split_once("..=")?;
    Some(format!("a whole number from {first} to {last}"))
}

/// Turns clap's message about an option's wrong value into a mistake.
fn value(message: &clap::Error, argument: &str) -> Mistake {
    let value = said(message, ContextKind::InvalidValue).unwrap_or_default();
    let option = argument.split(' ').next().unwrap_or_default();
    let source = std::error::Error::source(message);
    let wrong = match source.and_then(|e| e.downcast_ref::<Mistake>()) {
        Some(own) if value.trim().is_empty() => Mistake {
            what: "no value is given".to_owned(),
            ..own.clone()
        },
        Some(own) => own.clone(),
        None => {
            let what = match value.as_str() {
                "" => "no value is given".to_owned(),
                value => format!("`{value}` is not a value of {option}"),
            };
            let known = said(message, ContextKind::ValidValue).filter(|known| !known.is_empty());
            let known = known.map(|known| format!("one of {known}"));
            let expected = known.or_else(|| source.map(expected));
            Mistake::new(what)
                .expected(expected.unwrap_or_else(|| format!("a value as in {argument}")))
                .nearest(said(message, ContextKind::SuggestedValue))
        }
    };
    let place = wrong.place.clone();
    wrong.at(place.unwrap_or_else(|| format!("{option} {value}").trim().to_owned()))
}
