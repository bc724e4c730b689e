//! Which values were given on the command line.

use answers::origins::Asked;
use clap::ArgMatches;
use clap::parser::ValueSource;

use crate::settings::Settings;

/// The flags that were on a subcommand's command line, and those whose default the user set.
pub(crate) fn on(matches: &ArgMatches, settings: &Settings) -> Asked {
    let Some((_, matches)) = matches.subcommand() else {
        return Asked::default();
    };
    let given =
        |id: &&clap::Id| matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
    let flags = matches.ids().filter(given).map(|id| id.to_string());
    let set = matches.ids().filter_map(|id| {
        let setting = settings.get(&id.as_str().replace('_', "-"))?;
        Some((id.to_string(), setting.origin.clone()))
    });
    Asked::these(flags.collect(), set.collect())
}
