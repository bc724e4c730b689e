//! Constraints: `--fix`, `--min`, `--max` and `--forbid`, and the same as a file.

use planner::constraints::{CHOICES, DIMENSIONS};
use planner::{Constraints, PlannerError, SearchSpace};
use plans::Decisions;

use crate::mutate;
use crate::outcome::Outcome;
use crate::rng::Rng;
use crate::scene::Scene;
use crate::target::{Depth, Pool, Target};
use crate::tree::Format;

/// Constraints that are mostly sensible, as lines of flags.
pub(super) fn random(rng: &mut Rng) -> String {
    let mut lines = Vec::new();
    for _ in 0..1 + rng.below(3) {
        let size = *rng.pick(&DIMENSIONS);
        let number = match rng.below(12) {
            0 => mutate::number("2", rng),
            n => (1 << (n % 4)).to_string(),
        };
        lines.push(match rng.below(6) {
            0 => format!("min {size}={number}"),
            1 => format!("max {size}={number}"),
            2 => format!("forbid {size}"),
            3 => format!("fix {size}={number}|{}", 1 << rng.below(4)),
            4 => format!("fix {size}={number}"),
            _ => choice(rng),
        });
    }
    lines.join("\n")
}

fn choice(rng: &mut Rng) -> String {
    let key = *rng.pick(&CHOICES);
    let values: &[&str] = match key {
        "zero" => &["0", "1", "2", "3", "9", "0|2", "1|3"],
        "cp_kind" => &["ring", "all_gather", "all_to_all", "rings"],
        "optim_states" => &[
            "own",
            "split_master",
            "bf16_moments",
            "8bit_moments",
            "split_master|own",
        ],
        "offload" => &[
            "none",
            "optimizer",
            "none|optimizer:50",
            "parameters",
            "nvme",
        ],
        "grad_dtype" => &["fp32", "bf16", "fp32|bf16", "fp32/bf16", "fp64"],
        "schedule" => &[
            "1f1b",
            "interleaved",
            "gpipe",
            "zb-h1",
            "zb-v",
            "dualpipe-v",
            "zbv",
        ],
        "recompute" => &[
            "none",
            "full",
            "selective",
            "layers",
            "layers:1",
            "falling:1",
            "full|none",
        ],
        _ => &["on", "off", "true", "yes"],
    };
    format!("fix {key}={}", rng.pick(values))
}

/// Parses constraints from lines such as `fix tp=2`.
pub(super) fn parse(text: &str) -> Result<Constraints, PlannerError> {
    let mut constraints = Constraints::default();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        match verb {
            "min" => constraints.at_least(rest)?,
            "max" => constraints.at_most(rest)?,
            "forbid" => constraints.forbid(rest)?,
            _ => constraints.fix(rest)?,
        }
    }
    constraints.check()?;
    Ok(constraints)
}

/// Checks that a strategy keeps to constraints, without using the planner's own check.
pub(super) fn within(constraints: &Constraints, d: &Decisions) -> Result<(), String> {
    let sizes = [
        ("tp", d.tp),
        ("pp", d.pp),
        ("vpp", d.vpp),
        ("cp", d.cp),
        ("ep", d.ep),
        ("etp", d.etp),
        ("dp", d.dp()),
        ("dp_shard", d.dp_shard),
        ("dp_replicate", d.dp_replicate),
        ("mbs", d.micro_batch),
    ];
    for (key, size) in sizes {
        let least = constraints.min.get(key).copied().unwrap_or(0);
        let most = constraints.max.get(key).copied().unwrap_or(u64::MAX);
        if size < least || size > most {
            return Err(format!("{key}={size} is not from {least} to {most}"));
        }
    }
    let recompute = plans::grammar::recompute_name(d.recompute);
    let names = [
        ("cp_kind", d.cp_kind.name().to_owned()),
        ("zero", u8::from(d.zero).to_string()),
        ("schedule", d.schedule.to_string()),
        (
            "recompute",
            recompute.split(':').next().unwrap_or_default().to_owned(),
        ),
        (
            "sp",
            if d.sequence_parallel { "on" } else { "off" }.to_owned(),
        ),
    ];
    let sizes = sizes.map(|(key, size)| (key, size.to_string()));
    for (key, value) in sizes.into_iter().chain(names) {
        let Some(allowed) = constraints.fix.get(key) else {
            continue;
        };
        let taken = allowed.iter().any(|a| {
            let a = a.trim();
            *a == value
                || a == recompute
                || a.parse::<u64>().ok() == value.parse().ok() && value.parse::<u64>().is_ok()
        });
        if !taken {
            return Err(format!("{key}={value} is none of {allowed:?}"));
        }
    }
    Ok(())
}

fn judged(constraints: &Constraints, scene: &Scene, depth: Depth) -> Outcome {
    let fixed: Vec<&str> = constraints.fix.keys().map(String::as_str).collect();
    let mut outcome = Outcome::accepted(format!(
        "min {:?} max {:?} fix {fixed:?}",
        constraints.min.keys(),
        constraints.max.keys()
    ));
    if depth == Depth::Read {
        return outcome;
    }
    let Ok(scenario) = scene.scenario() else {
        return outcome;
    };
    let legal = planner::legal_values::check(&scenario, &[scene.gpus], constraints);
    if let Err(error) = legal {
        return Outcome::refused(&error);
    }
    let space = SearchSpace::new(&scenario, constraints);
    let layouts = space.layouts();
    for layout in layouts.iter().step_by(1 + layouts.len() / 50) {
        let strategies = space.strategies(layout);
        for strategy in strategies.iter().step_by(1 + strategies.len() / 30) {
            let held = within(constraints, strategy.decisions());
            outcome.expect(held.is_ok(), || {
                format!("a strategy of the space: {held:?}")
            });
        }
    }
    outcome
}

/// Fuzzes constraints written as flags, one a line: `fix tp=2|4`.
pub(super) fn flags() -> Target {
    Target {
        use_every: 512,
        ..Target::of_text("constraints", flags_seeds, flags_changed, flags_read)
    }
}

fn flags_seeds() -> Vec<Vec<u8>> {
    let texts = [
        "fix tp=2|4\nmax pp=2",
        "forbid cp,ep\nmin dp=2",
        "fix zero=1\nfix schedule=1f1b",
    ];
    let scene = Scene::default();
    texts
        .iter()
        .map(|t| format!("{scene}\n{t}").into_bytes())
        .collect()
}

fn flags_changed(pool: &Pool, rng: &mut Rng) -> Vec<u8> {
    if rng.percent(60) {
        let scene = Scene {
            gpus: 8,
            ..Scene::random(rng)
        };
        return format!("{scene}\n{}", random(rng)).into_bytes();
    }
    mutate::text(pool, rng)
}

fn flags_read(text: &str, depth: Depth) -> Outcome {
    let (scene, text) = Scene::split(text);
    let well_formed = text.lines().all(|line| {
        let rest = line.split_once(' ').map_or("", |(_, rest)| rest);
        line.starts_with("forbid") || rest.split(',').all(|p| p.contains('='))
    });
    match parse(text) {
        Ok(constraints) => judged(&constraints, &scene, depth),
        Err(error) if well_formed => Outcome::refused(&error),
        Err(error) => Outcome::malformed(&error),
    }
}

/// Fuzzes constraints written as a YAML file.
pub(super) fn files() -> Target {
    Target {
        use_every: 512,
        ..Target::of_text(
            "constraints-yaml",
            files_seeds,
            |pool, rng| Format::Yaml.mutate(pool, rng),
            files_read,
        )
    }
}

fn files_seeds() -> Vec<Vec<u8>> {
    let texts = [
        "min: {tp: 2}\nmax: {pp: 4, cp: 1}\n",
        "fix:\n  tp: ['2', '4']\n  zero: ['1']\n  schedule: ['1f1b']\nuneven: 2\n",
    ];
    texts.iter().map(|t| t.as_bytes().to_vec()).collect()
}

fn files_read(text: &str, depth: Depth) -> Outcome {
    let constraints: Constraints = match catalog::text::yaml(text, "input") {
        Ok(constraints) => constraints,
        Err(error) if Format::Yaml.parse(text).is_some() => return Outcome::refused(&error),
        Err(error) => return Outcome::malformed(&error),
    };
    match constraints.check() {
        Ok(()) => judged(&constraints, &Scene::default(), depth),
        Err(error) => Outcome::refused(&error),
    }
}
