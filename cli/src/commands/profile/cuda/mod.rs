//! `profile --device cuda`: measures GPUs.

mod grid;
mod hosts;
mod messages;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use catalog::files::{Destination, Kind, Replace};
use catalog::profile::{self, Machine, Profile};
use comm::Communicator;
use cuda_device::{DeviceFacts, EIGHT_BITS, ready};
use profiler::cuda::{
    Asked, Budget, Exchange, Fleet, GpuRank, Meter, Request, Target, complete, with_fleet,
};

use self::hosts::Hosts;
use super::file::ProfileFile;
use super::requests::{What, effort, of_plan};
use super::shown::show;
use crate::args::{ProfileArgs, SuiteArg};
use crate::commands::{device, plan};
use crate::error::CliError;
use crate::inputs;
use crate::output::{self, Progress};

/// Time budgets for all measurements of a suite on one GPU, and for messages between GPUs. Starting devices, compiling
/// kernels, making operands and checking results take additional time.
fn budgets(suite: SuiteArg) -> [Duration; 2] {
    match suite {
        SuiteArg::Quick => [30, 10],
        SuiteArg::Full => [190, 80],
    }
    .map(Duration::from_secs)
}

/// The measurements to make.
struct Wanted {
    /// Requests on one GPU.
    alone: Vec<Request>,
    /// Exchanges between GPUs.
    between: Vec<Exchange>,
    /// Numbers of GPUs for which exchanges cannot be measured here.
    beyond: Vec<u64>,
}

/// A profile in the making: its file is written after every measurement.
struct Growing {
    profile: Profile,
    file: ProfileFile,
    suite: SuiteArg,
    progress: Progress,
    /// Number of measurements in total, and in the phases that are complete.
    parts: [usize; 2],
    too_large: Vec<String>,
}

/// Runs `profile --device cuda`. Saves each measurement as soon as it is made and skips those
/// already in the file. Messages come first, so that the other hosts are free afterwards.
pub(crate) fn run(args: &ProfileArgs) -> Result<ExitCode, CliError> {
    let path = args.output_profile.as_deref();
    let path = path.unwrap_or(Path::new(profile::DEFAULT_PATH));
    Destination::check(path, Kind::Profile, Replace::SameKind)?;
    let facts = ready()?;
    let hosts = args.all_hosts.then(Hosts::join).transpose()?;
    if let Some(hosts) = hosts.as_ref().filter(|hosts| hosts.comm.rank() > 0) {
        hosts.follow()?;
        return Ok(ExitCode::SUCCESS);
    }
    let gpus = gpus_of_host(args, facts.len() as u64, hosts.as_ref())?;
    let own = hosts.as_ref().map_or(0, |hosts| hosts.gpu);
    let target = || Target::new(own, args.attention.into());
    // The device is dropped here, which frees its memory for the measurements.
    let machine = target()?.machine();
    let hosts_count = hosts.as_ref().map_or(1, Hosts::count);
    let wanted = wanted(args, hosts_count, gpus, facts.first())?;
    let mut growing = Growing::new(args, path, &machine, wanted.parts())?;
    let [alone, between] = budgets(args.suite);
    match &hosts {
        Some(hosts) => {
            let rank = GpuRank::new(own)?;
            let mut fleet = Fleet::new(machine, rank, &hosts.comm, hosts.per_host);
            growing.complete(&mut fleet, &wanted.between, between)?;
        }
        None if gpus > 1 => {
            let open = |rank: usize| GpuRank::new(rank as u32);
            with_fleet(machine, gpus as usize, open, |fleet| {
                growing.complete(fleet, &wanted.between, between)
            })?;
        }
        None => {}
    }
    let mut target = target()?;
    target.warm_up()?;
    growing.complete(&mut target, &wanted.alone, alone)?;
    growing.progress.finish();
    if let Some(reason) = target.without_library() {
        let text = format!("core attention by {}", device::own_kernels(Some(&reason)));
        output::note(args.output.quiet, &text);
    }
    notes(args.output.quiet, &growing.too_large, &wanted.beyond, gpus);
    let profile = growing.file.add(&growing.profile)?;
    show(args.output, profile, growing.file.path())?;
    if !args.output.json {
        let note = "for other systems than this program's own, name it as `profile` in a cluster file that `extends` a preset";
        output::note(args.output.quiet, note);
    }
    Ok(ExitCode::SUCCESS)
}

/// Number of GPUs of this host to measure messages between.
fn gpus_of_host(args: &ProfileArgs, here: u64, hosts: Option<&Hosts>) -> Result<u64, CliError> {
    let gpus = match hosts {
        Some(hosts) => hosts.per_host as u64,
        None => args.gpus.unwrap_or(here),
    };
    if gpus == 0 || (gpus > here && hosts.is_none()) {
        return inputs::refuse(
            "--gpus",
            gpus,
            &format!("1 to {here}, which this host shows"),
        );
    }
    Ok(gpus)
}

fn notes(quiet: bool, too_large: &[String], beyond: &[u64], gpus: u64) {
    if !too_large.is_empty() {
        let list = too_large.join(", ");
        let text =
            format!("left out because their operands do not fit in the GPU's memory: {list}");
        output::note(quiet, &text);
    }
    if !beyond.is_empty() {
        let list: Vec<String> = beyond.iter().map(u64::to_string).collect();
        let text = format!(
            "not measured: messages between {} GPUs; {gpus} of this host were used",
            list.join(" and ")
        );
        output::note(quiet, &text);
    }
}

impl Growing {
    /// Starts from what the file holds; `parts` is the number of measurements to make.
    fn new(
        args: &ProfileArgs,
        path: &Path,
        machine: &Machine,
        parts: usize,
    ) -> Result<Self, CliError> {
        let (file, profile) = ProfileFile::open(path, machine)?;
        device::measured_as_run(args.attention, &profile, path)?;
        Ok(Self {
            profile,
            file,
            suite: args.suite,
            progress: Progress::new(args.output.quiet, "measuring"),
            parts: [parts, 0],
            too_large: Vec::new(),
        })
    }

    /// Measures the requests of `asked` that the profile lacks.
    fn complete<M: Meter>(
        &mut self,
        meter: &mut M,
        asked: &[M::Asked],
        budget: Duration,
    ) -> Result<(), CliError> {
        let time = (Budget::new(budget), effort(self.suite).at_once());
        let own: usize = asked.iter().map(Asked::parts).sum();
        let (progress, file, [all, over]) = (&self.progress, &self.file, self.parts);
        let after = |share: f64, profile: &Profile| {
            progress.update((over as f64 + share * own as f64) / all as f64);
            file.add(profile).map(drop)
        };
        let too_large = complete(meter, &mut self.profile, asked, time, after)?;
        self.too_large.extend(too_large);
        self.parts[1] += own;
        Ok(())
    }
}

impl Wanted {
    fn parts(&self) -> usize {
        let alone: usize = self.alone.iter().map(Asked::parts).sum();
        alone + self.between.len()
    }
}

/// The measurements to make: those that plans need, or grids.
fn wanted(
    args: &ProfileArgs,
    hosts: u64,
    gpus: u64,
    first: Option<&DeviceFacts>,
) -> Result<Wanted, CliError> {
    let over_hosts = messages::over_hosts(args.suite, hosts, gpus);
    if args.plans.is_empty() {
        let eight_bits = first.is_some_and(|gpu| gpu.capability >= EIGHT_BITS);
        return Ok(Wanted {
            alone: grid::requests(args.suite, gpus, eight_bits)?,
            between: [messages::grid(args.suite, gpus), over_hosts].concat(),
            beyond: Vec::new(),
        });
    }
    let (mut alone, mut between) = (Vec::new(), Vec::new());
    for path in &args.plans {
        let of_plan = of_plan(path, 1)?;
        for request in &of_plan {
            if let What::Block(block) = &request.what {
                between.extend(messages::of_block(block));
            }
        }
        alone.extend(of_plan.into_iter().filter_map(|r| r.what.on_one_gpu()));
        let loaded = plan::load(path)?;
        let (s, workload) = (&loaded.strategy, &loaded.costs.scenario().workload);
        let tokens = s.micro_batch * workload.seq_len / s.cp;
        let split = if s.sequence_parallel { s.tp } else { 1 };
        let size = workload.precision.activation().size();
        let activation = tokens * loaded.costs.scenario().model.hidden * size / split;
        between.extend(messages::beside_blocks(s, activation, args.suite));
    }
    let (mut between, mut beyond) = messages::possible(between, gpus);
    between.extend(over_hosts);
    // With several hosts, a plan's exchanges are priced from the grid over hosts.
    beyond.retain(|_| hosts == 1);
    Ok(Wanted {
        alone,
        between,
        beyond,
    })
}
