//! Devices that a plan lost, and what is left of its cluster.

use std::fmt;

use catalog::{Mistake, Pool, Pools};

use crate::inputs::Inputs;
use crate::values::{self, Gpus};

/// Devices that were lost, as they were given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    gpus: Gpus,
    /// The pool that lost them, if one was named.
    pool: Option<String>,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gpus = self.gpus.to_string();
        match &self.pool {
            None => f.write_str(&gpus),
            Some(pool) => write!(f, "'{} of {pool}'", gpus.trim_matches('\'')),
        }
    }
}

/// Reads devices that were lost: `2nodes`, `16`, and of a cluster of several pools `2nodes of dgx2-v100`.
///
/// # Errors
/// When the text says no number of devices.
pub fn loss(text: &str) -> Result<Loss, Mistake> {
    let parted = [" of ", " x "]
        .iter()
        .find_map(|between| text.split_once(between));
    let (number, named) = match parted {
        Some((number, pool)) => (number, Some(pool.trim().to_owned())),
        None => (text, None),
    };
    let wrong = |mistake: Mistake| {
        let mistake = Mistake {
            what: format!("`{text}` is not a number of GPUs"),
            ..mistake
        };
        mistake
            .expected("GPUs or nodes, and of a cluster of several pools those of which pool")
            .example("--lost 8, --lost 2nodes, --lost '2nodes of dgx2-v100'")
    };
    match (values::gpus(number).map_err(wrong)?, named) {
        (Gpus::Of(_, _), Some(_)) => Err(wrong(Mistake::default())),
        (Gpus::Of(count, device), None) => Ok(Loss {
            gpus: Gpus::Count(count),
            pool: Some(device),
        }),
        (gpus, pool) => Ok(Loss { gpus, pool }),
    }
}

/// The devices of a plan that are left after losses.
#[derive(Clone, Debug)]
pub struct Left {
    /// The cluster that is left, with its devices.
    pub cluster: Pool,
    /// The pools that there were, one if all nodes were alike.
    pub had: Vec<Pool>,
    /// Number of devices lost in each of these pools.
    pub lost: Vec<u64>,
}

impl Left {
    /// The devices of a plan that are left after `losses`.
    ///
    /// # Errors
    /// When a loss names none of several pools, or more than there is; when nothing is left, or not
    /// whole nodes.
    pub fn of(plan: &Inputs, losses: &[Loss]) -> Result<Self, Mistake> {
        let wrong = |mistake: Mistake| {
            let losses: Vec<String> = losses.iter().map(Loss::to_string).collect();
            mistake.at(format!("--lost {}", losses.join(" --lost ")))
        };
        match &plan.scenario.cluster.pools {
            None => of_one(plan, losses).map_err(|mistake| {
                wrong(Mistake {
                    example: possible(plan).map(str::to_owned),
                    ..mistake
                })
            }),
            Some(pools) => of_several(pools, losses).map_err(wrong),
        }
    }

    /// Number of devices that were lost.
    #[must_use]
    pub fn gpus_lost(&self) -> u64 {
        self.lost.iter().sum()
    }

    /// Number of devices that there were.
    #[must_use]
    pub fn gpus_had(&self) -> u64 {
        self.had.iter().map(|pool| pool.gpus).sum()
    }
}

/// A loss that leaves GPUs of a plan on equal nodes, as an example: one node of several, or one GPU
/// of a node; `None` if the plan has only one GPU.
fn possible(plan: &Inputs) -> Option<&'static str> {
    let node = plan.scenario.cluster.gpus_per_node;
    match plan.json.gpus {
        0 | 1 => None,
        gpus if gpus > node => Some("--lost 1node"),
        _ => Some("--lost 1"),
    }
}

/// The devices left of a cluster with equal nodes; whole nodes if there are several.
fn of_one(plan: &Inputs, losses: &[Loss]) -> Result<Left, Mistake> {
    let (had, cluster) = (plan.json.gpus, &plan.scenario.cluster);
    let of = Pool {
        arg: plan.cluster_arg.clone(),
        cluster: cluster.clone(),
        gpus: had,
    };
    let only = Pools {
        parts: vec![of.clone()],
        between: None,
    };
    let mut others = losses.iter().filter_map(|loss| loss.pool.as_ref());
    if let Some(other) = others.find(|name| only.named(name).is_err()) {
        let wrong = Mistake::new(format!("the plan is on {} alone, not {other}", of.arg));
        return Err(wrong.expected("a number of GPUs or nodes"));
    }
    let lost = losses.iter().map(|loss| loss.gpus.count(cluster));
    let lost = lost.fold(0, u64::saturating_add);
    if lost == 0 || lost >= had {
        let expected = match had {
            1 => "a plan of 2 GPUs or more".to_owned(),
            _ => format!("1 to {}", had - 1),
        };
        let wrong = Mistake::new(format!("{lost} GPUs are lost, and the plan has {had}"));
        return Err(wrong.expected(expected));
    }
    whole(&of, lost)?;
    Ok(Left {
        cluster: Pool {
            gpus: had - lost,
            ..of.clone()
        },
        had: vec![of],
        lost: vec![lost],
    })
}

/// What is left of several pools; a pool keeps whole nodes if it has several.
fn of_several(pools: &Pools, losses: &[Loss]) -> Result<Left, Mistake> {
    let names = pools.names();
    let example = |name: &str| format!("--lost '1node of {name}'");
    let mut lost = vec![0u64; names.len()];
    for loss in losses {
        let Some(name) = &loss.pool else {
            let wrong = Mistake::new(format!(
                "the plan has {} pools, and `{}` does not name the pool that lost them",
                names.len(),
                loss.gpus.to_string().trim_matches('\'')
            ));
            let wrong = wrong.expected(format!("GPUs or nodes of one of {}", pools.listed()));
            return Err(wrong.example(example(&names[0])));
        };
        let at = pools
            .named(name)
            .map_err(|wrong| wrong.example(example(&names[0])))?;
        let count = loss.gpus.count(&pools.parts[at].cluster);
        let (name, had) = (&names[at], pools.parts[at].gpus);
        lost[at] = lost[at].saturating_add(count);
        if count == 0 || lost[at] > had {
            let wrong = Mistake::new(format!(
                "{} GPUs of {name} are lost, and it has {had}",
                lost[at]
            ));
            return Err(wrong.expected(format!("1 to {had}")).example(example(name)));
        }
    }
    for (pool, &lost) in pools.parts.iter().zip(&lost) {
        whole(pool, lost)?;
    }
    let wrong = || {
        let wrong = Mistake::new(format!("all {} GPUs of the plan are lost", pools.gpus()));
        wrong
            .expected("a loss that leaves some GPUs to plan for")
            .example(example(&names[0]))
    };
    Ok(Left {
        cluster: pools.without(&lost).ok_or_else(wrong)?,
        had: pools.parts.clone(),
        lost,
    })
}

/// Refuses a loss that leaves a node of a pool with some of its GPUs, unless all that is left fits one node.
fn whole(pool: &Pool, lost: u64) -> Result<(), Mistake> {
    let left = pool.gpus - lost;
    if left == 0 || lost == 0 {
        return Ok(());
    }
    pool.cluster.check_devices(left).map_err(|why| {
        let node = pool.cluster.gpus_per_node;
        let nodes = lost.div_ceil(node) * node;
        let near = (nodes < pool.gpus).then(|| nodes.to_string());
        Mistake::new(format!("{left} GPUs are left: {why}")).nearest(near)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_read_as_people_write_them() {
        let read = |number, pool: Option<&str>| Loss {
            gpus: number,
            pool: pool.map(str::to_owned),
        };
        for (text, expected) in [
            ("8", read(Gpus::Count(8), None)),
            ("2nodes", read(Gpus::Nodes(2), None)),
            (
                "2 nodes of dgx2-v100",
                read(Gpus::Nodes(2), Some("dgx2-v100")),
            ),
            (
                "1 node x dgx-h100 at 0.8",
                read(Gpus::Nodes(1), Some("dgx-h100 at 0.8")),
            ),
            ("8 of pool 2", read(Gpus::Count(8), Some("pool 2"))),
            ("4x h100-sxm", read(Gpus::Count(4), Some("h100-sxm"))),
        ] {
            assert_eq!(loss(text), Ok(expected), "{text}");
        }
        for text in ["", "some", "4x h100 of dgx-h100", "all of dgx-h100"] {
            let wrong = loss(text).expect_err(text);
            assert!(
                wrong.what.contains("is not a number of GPUs"),
                "{text}: {wrong}"
            );
        }
    }
}
