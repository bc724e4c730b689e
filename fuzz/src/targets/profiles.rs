//! Profiles of machines, as `profile` writes them.

use catalog::Profile;
use catalog::profile::{Gpu, Machine, Measured, SCHEMA_VERSION};

use super::clusters;
use crate::outcome::Outcome;
use crate::target::{Depth, Target};
use crate::tree::Format;

fn profile(gpu: Option<Gpu>) -> Profile {
    let measured = [
        ("matmul forward f32", vec![64, 64, 64], 1.5e-5),
        ("matmul backward bf16", vec![1024, 4096, 4096], 2.5e-4),
        ("copy", vec![1 << 20], 1e-4),
        ("message", vec![1 << 16], 3.25e-5),
        ("norm forward f32", vec![64, 768], 8e-6),
    ];
    let measured = measured.map(|(kernel, sizes, seconds)| Measured {
        kernel: kernel.to_owned(),
        sizes,
        ranks: 1,
        seconds,
        spread: 0.03,
    });
    Profile {
        schema_version: SCHEMA_VERSION,
        tool_version: "0.1.0".to_owned(),
        machine: Machine {
            processor: "Test \"Processor\" 9000".to_owned(),
            cores: 8,
            memory_bytes: 64 << 30,
            gpu,
        },
        measured: measured.into(),
    }
}

/// Profile files.
pub(super) fn profiles() -> Target {
    Target::of_text(
        "profiles",
        seeds,
        |pool, rng| Format::Yaml.mutate(pool, rng),
        read,
    )
}

fn seeds() -> Vec<Vec<u8>> {
    let gpu = Gpu {
        count: 8,
        hosts: Some(2),
        multiprocessors: 132,
        driver: Some("580.1".to_owned()),
        attention: Some("cuDNN 9.10".to_owned()),
        clock_mhz: Some([1700, 1980]),
        most_clock_mhz: Some(1980),
        memory_clock_mhz: Some(2619),
        power_limit_watts: Some(700),
    };
    let both = [profile(None), profile(Some(gpu))];
    both.iter().map(|p| p.to_yaml().into_bytes()).collect()
}

fn read(text: &str, depth: Depth) -> Outcome {
    let profile = match Profile::from_yaml(text, "input") {
        Ok(profile) => profile,
        Err(error) => return clusters::refused(text, &error),
    };
    let gpu = profile.machine.gpu.is_some();
    let count = profile.measured.len();
    let mut outcome = Outcome::accepted(format!("gpu {gpu}, {count} kernels"));
    // Times are written with four digits: from the second time on nothing changes.
    let written = profile.to_yaml();
    match Profile::from_yaml(&written, "written") {
        Ok(again) => {
            outcome.expect(again.to_yaml() == written, || {
                "written twice, unlike".to_owned()
            });
            let same = again.machine == profile.machine && again.measured.len() == count;
            outcome.expect(same, || "written, it is another machine's".to_owned());
        }
        Err(error) => outcome.expect(false, || format!("what is written: {error}")),
    }
    let peak = profile.peak().0;
    outcome.expect(peak.is_finite() && peak > 0.0, || format!("peak {peak}"));
    if depth == Depth::Use {
        if let Some(cluster) = clusters::with_profile(profile.clone()) {
            clusters::priced(cluster, &mut outcome);
        }
        match profile.cluster("input") {
            Ok(cluster) => clusters::priced(cluster, &mut outcome),
            Err(error) => return Outcome::refused(&error),
        }
    }
    outcome
}
