//! Checks a scenario: its rates and times, which prices divide by and add up, and its precision.

use catalog::{Cluster, Precision};

use crate::{CostError, Scenario};

/// What error messages say that a rate has to be.
const RATE: &str = "finite rate above 0";

/// Refuses a scenario whose numbers give no usable prices. Rates must be above 0, times 0 or more, the slow-down 1 or more, the
/// headroom below 1, and all finite.
pub(crate) fn check(scenario: &Scenario) -> Result<(), CostError> {
    let cluster = &scenario.cluster;
    let device = &cluster.device;
    let rates = [
        ("device memory bandwidth", device.memory_bandwidth.value.0),
        ("scale-up bandwidth", cluster.scale_up.bandwidth.value.0),
        ("scale-out bandwidth", cluster.scale_out.bandwidth.value.0),
    ];
    for (name, value) in rates {
        held(name, value, value > 0.0, RATE)?;
    }
    for (dtype, peak) in &device.peak {
        let name = format!("dense peak, {dtype:?}").to_lowercase();
        held(&name, peak.value.0, peak.value.0 > 0.0, RATE)?;
    }
    for (name, value) in times(scenario) {
        held(name, value, value >= 0.0, "finite number, 0 or more")?;
    }
    let (slower, headroom) = (
        scenario.runtime.overheads.overlap_slowdown.value,
        scenario.headroom,
    );
    held(
        "slow-down beside collectives",
        slower,
        slower >= 1.0,
        "finite factor, 1 or more",
    )?;
    let fraction = (0.0..1.0).contains(&headroom);
    held("headroom", headroom, fraction, "fraction from 0 to below 1")
}

/// Names and values of the scenario's numbers that must be 0 or more. Most are times.
fn times(scenario: &Scenario) -> [(&'static str, f64); 11] {
    let (cluster, overheads) = (&scenario.cluster, &scenario.runtime.overheads);
    [
        ("scale-up latency", cluster.scale_up.latency.value.0),
        ("scale-out latency", cluster.scale_out.latency.value.0),
        ("host time per kernel", overheads.launch.value.0),
        ("host time per step", overheads.step.value.0),
        (
            "time per byte of gradients",
            overheads.gradient_byte.value.0,
        ),
        (
            "bytes that the optimizer moves per element",
            overheads.optimizer_bytes.value,
        ),
        (
            "host time to update one tensor",
            overheads.optimizer_tensor.value.0,
        ),
        (
            "host time to gather one gradient for clipping",
            overheads.whole_gradient.value.0,
        ),
        (
            "host time of DTensor for one linear layer in a pass",
            overheads.parallel_linear.value.0,
        ),
        ("time per pipeline transfer", overheads.transfer.value.0),
        (
            "reserved over allocated memory",
            overheads.fragmentation.value,
        ),
    ]
}

/// Checks that nodes that are all alike have prices for a precision.
///
/// # Errors
/// When the device has no matrix units for it; when a profile has no measurement in it, but in others.
pub fn check_precision(cluster: &Cluster, precision: Precision) -> Result<(), CostError> {
    // A profile prices what was measured, on whichever units it ran.
    let has = |p: &Precision| match &cluster.profile {
        Some(profile) => profile.has_kernels_in(p.activation()),
        None => cluster.device.has_units_for(p.matmul()),
    };
    let known: Vec<&str> = (Precision::ALL.iter().copied().filter(has))
        .map(Precision::name)
        .collect();
    if has(&precision) || known.is_empty() {
        return Ok(());
    }
    let (precision, others) = (precision.name().to_owned(), known.join(", "));
    Err(match &cluster.profile {
        Some(_) => CostError::UnmeasuredPrecision { precision, others },
        None => CostError::NoUnits {
            device: cluster.device.name.clone(),
            precision,
            others,
        },
    })
}

/// Refuses a value that is not finite or not in its range.
fn held(name: &str, value: f64, in_range: bool, expected: &'static str) -> Result<(), CostError> {
    if in_range && value.is_finite() {
        return Ok(());
    }
    Err(CostError::Quantity {
        name: name.to_owned(),
        value,
        expected,
    })
}
