//! Which rank this process is, and where the others meet, as launchers tell it in the environment.

use std::fmt;

/// A process's place in a job, and where rank 0 listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// This rank.
    pub rank: usize,
    /// All ranks.
    pub world: usize,
    /// This rank among those of its host: the number of its GPU.
    pub local_rank: usize,
    /// Host of rank 0.
    pub host: String,
    /// Port on which rank 0 listens.
    pub port: u16,
}

/// Where a job meets when nothing says another port: torchrun's default.
const PORT: u16 = 29500;

/// Names under which a launcher tells rank, world and local rank.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
}

/// torchrun's names come first: a script inside a Slurm or MPI job may set them to start ranks of its own.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    Launcher {
        name: "PMI",
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        world: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
    },
];

/// Why a process does not know its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// No launcher has set its variables.
    #[error(
        "no launcher says which rank this process is: start it with torchrun, srun or mpirun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )]
    NoLauncher,
    /// One of a launcher's variables is missing.
    #[error("{launcher} set {set} but not {missing}")]
    Missing {
        /// Which launcher.
        launcher: &'static str,
        /// What is there.
        set: &'static str,
        /// What is not.
        missing: &'static str,
    },
    /// A variable is no number in range.
    #[error("{name}={value}: expected {expected}")]
    Value {
        /// Variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: String,
    },
}

impl Place {
    /// The place that the environment tells; `variable` looks a name up.
    ///
    /// # Errors
    /// When no launcher, or one only half, says it.
    pub fn new(variable: impl Fn(&str) -> Option<String>) -> Result<Self, PlaceError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let launcher = LAUNCHERS
            .iter()
            .find(|launcher| variable(launcher.rank).is_some())
            .ok_or(PlaceError::NoLauncher)?;
        let number =
            |name: &'static str, below: Option<usize>| -> Result<Option<usize>, PlaceError> {
                let Some(value) = variable(name) else {
                    return Ok(None);
                };
                let expected =
                    || below.map_or("a number".to_owned(), |b| format!("a number below {b}"));
                match value.parse() {
                    Ok(number) if below.is_none_or(|below| number < below) => Ok(Some(number)),
                    _ => Err(PlaceError::Value {
                        name,
                        value,
                        expected: expected(),
                    }),
                }
            };
        let missing = |missing| PlaceError::Missing {
            launcher: launcher.name,
            set: launcher.rank,
            missing,
        };
        let world = number(launcher.world, None)?.ok_or_else(|| missing(launcher.world))?;
        let rank = number(launcher.rank, Some(world))?.unwrap_or(0);
        let local_rank = number(launcher.local_rank, Some(world))?;
        let port = number("MASTER_PORT", Some(1 << 16))?;
        let host = variable("MASTER_ADDR")
            .or_else(|| variable("SLURM_LAUNCH_NODE_IPADDR"))
            .or_else(|| (local_rank == Some(rank)).then(|| "127.0.0.1".to_owned()))
            .ok_or_else(|| missing("MASTER_ADDR"))?;
        Ok(Self {
            rank,
            world,
            local_rank: local_rank.unwrap_or(0),
            host,
            port: port.map_or(PORT, |port| port as u16),
        })
    }

    /// The variables that tell another process of this host its place, as torchrun does.
    #[must_use]
    pub fn variables(&self) -> [(&'static str, String); 5] {
        [
            ("RANK", self.rank.to_string()),
            ("WORLD_SIZE", self.world.to_string()),
            ("LOCAL_RANK", self.local_rank.to_string()),
            ("MASTER_ADDR", self.host.clone()),
            ("MASTER_PORT", self.port.to_string()),
        ]
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            world,
            host,
            port,
            ..
        } = self;
        write!(f, "rank {rank} of {world}, meeting at {host}:{port}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &[(&str, &str)]) -> Result<Place, PlaceError> {
        Place::new(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn launchers_tell_ranks_their_place() {
        let at = |rank, world, local_rank, host: &str, port| {
            Ok(Place {
                rank,
                world,
                local_rank,
                host: host.to_owned(),
                port,
            })
        };
        let torchrun = [
            ("RANK", "9"),
            ("WORLD_SIZE", "16"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "4000"),
            ("SLURM_PROCID", "1"),
        ];
        assert_eq!(place(&torchrun), at(9, 16, 1, "node0", 4000));
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"),
        ];
        assert_eq!(place(&slurm), at(3, 4, 1, "10.0.0.1", PORT));
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "2"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
        ];
        assert_eq!(place(&open_mpi), at(2, 4, 2, "127.0.0.1", PORT));
        let pmi = [("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MASTER_ADDR", "a")];
        assert_eq!(place(&pmi), at(0, 2, 0, "a", PORT));
        let place = place(&torchrun).expect("above");
        let again = Place::new(|name| {
            let variables = place.variables();
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| value.clone())
        });
        assert_eq!(again, Ok(place));
    }

    #[test]
    fn half_a_place_is_refused() {
        let check = |variables: &[(&str, &str)], expected: &str| {
            let error = place(variables).expect_err("refused").to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(&[], "no launcher");
        check(&[("RANK", "0")], "torchrun set RANK but not WORLD_SIZE");
        check(
            &[("RANK", "2"), ("WORLD_SIZE", "2")],
            "RANK=2: expected a number below 2",
        );
        check(&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK=x");
        check(&[("RANK", "1"), ("WORLD_SIZE", "2")], "not MASTER_ADDR");
        check(
            &[
                ("RANK", "0"),
                ("WORLD_SIZE", "2"),
                ("MASTER_ADDR", "a"),
                ("MASTER_PORT", "70000"),
            ],
            "MASTER_PORT=70000",
        );
    }
}
