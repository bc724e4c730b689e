//! Describes the machine that is measured.

use catalog::profile::Machine;

/// This machine, as the operating system describes it.
#[must_use]
pub fn machine() -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let kib = field(&read("/proc/meminfo"), "MemTotal")
        .and_then(|m| m.trim_end_matches("kB").trim().parse::<u64>().ok());
    Machine {
        processor: field(&read("/proc/cpuinfo"), "model name")
            .unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        cores: std::thread::available_parallelism().map_or(1, usize::from) as u64,
        memory_bytes: kib.unwrap_or(8 << 20) * 1024,
        gpu: None,
    }
}
