//! Finds this process's rank, and the address where ranks meet, in the environment variables that launchers set.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use super::secret::{self, SHORTEST, Secret};

/// A process's rank in a job, and the address where rank 0 listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// This process's rank.
    pub rank: usize,
    /// Number of ranks in the job.
    pub world: usize,
    /// Rank among those on the same host; also the number of its GPU.
    pub local_rank: usize,
    /// Host name or address of rank 0.
    pub host: String,
    /// Port on which rank 0 listens.
    pub port: u16,
    /// Whether all ranks are on this host; they then listen on loopback only.
    pub one_host: bool,
    /// The secret that a process must prove to know before it may join.
    pub secret: Secret,
}

/// Address where ranks meet if all are on one host.
const LOOPBACK: &str = "127.0.0.1";

/// Variable with the path of a folder that belongs to this user alone and lasts for the login session.
const RUNTIME_FOLDER: &str = "XDG_RUNTIME_DIR";

/// Default port of rank 0, the same as torchrun's.
const PORT: u16 = 29500;

/// The variables in which a launcher gives rank, world size and local rank.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    here: Here,
}

/// How to tell from a launcher's variables whether all ranks are on this host.
enum Here {
    /// By a variable with the number of ranks on this host.
    Ranks(&'static str),
    /// By a variable with the number of hosts.
    Hosts(&'static str),
}

/// torchrun's variables take precedence: a script inside a Slurm or MPI job may set them to start ranks of its own.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        here: Here::Ranks("LOCAL_WORLD_SIZE"),
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        here: Here::Ranks("OMPI_COMM_WORLD_LOCAL_SIZE"),
    },
    Launcher {
        name: "PMI",
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        here: Here::Ranks("MPI_LOCALNRANKS"),
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        world: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        here: Here::Hosts("SLURM_STEP_NUM_NODES"),
    },
];

/// Why a process could not find its rank.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// No known launcher's variables are set.
    #[error(
        "no launcher says which rank this process is: start it with torchrun, srun or mpirun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )]
    NoLauncher,
    /// A launcher set only some of its variables.
    #[error("{launcher} set {set} but not {missing}")]
    Missing {
        /// Name of the launcher.
        launcher: &'static str,
        /// A variable that is set.
        set: &'static str,
        /// The variable that is missing.
        missing: &'static str,
    },
    /// A variable is not a number in range.
    #[error("{name}={value}: expected {expected}")]
    Value {
        /// Name of the variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What was expected.
        expected: String,
    },
    /// The job's secret is unusable. (The error names the variable, never its value.)
    #[error("{name}: {reason}")]
    Secret {
        /// Name of the variable.
        name: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// Several hosts without a secret: anybody on the network could join.
    #[error(
        "ranks of several hosts meet at {host}, where other machines can connect: give all of them the same secret of at least {SHORTEST} characters in {variable}, or the name of a file with it in {file}; where all ranks are on this host, set MASTER_ADDR=127.0.0.1",
        variable = secret::VARIABLE,
        file = secret::FILE_VARIABLE
    )]
    NoSecret {
        /// Name or address of the host on which rank 0 listens.
        host: String,
    },
}

impl Place {
    /// Finds the place in the environment; `variable` looks up a variable by name.
    ///
    /// # Errors
    /// When launchers' variables are missing or incomplete, or a number or the secret is unusable.
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
        let all_here = match launcher.here {
            Here::Ranks(name) => number(name, None)? == Some(world),
            Here::Hosts(name) => number(name, None)? == Some(1),
        };
        let host = if all_here {
            LOOPBACK.to_owned()
        } else {
            variable("MASTER_ADDR")
                .or_else(|| variable("SLURM_LAUNCH_NODE_IPADDR"))
                .or_else(|| (local_rank == Some(rank)).then(|| LOOPBACK.to_owned()))
                .ok_or_else(|| missing("MASTER_ADDR"))?
        };
        let one_host = world <= 1 || is_loopback(&host);
        let wrong = |(name, reason)| PlaceError::Secret { name, reason };
        let secret = match Secret::told(variable).map_err(wrong)? {
            Some(secret) => secret,
            // A single rank meets nobody.
            None if world <= 1 => {
                Secret::random().map_err(|reason| wrong((secret::VARIABLE, reason)))?
            }
            None if one_host => {
                let runtime = variable(RUNTIME_FOLDER).map(PathBuf::from);
                let folder = runtime.unwrap_or_else(std::env::temp_dir);
                let made = Secret::of_this_user(&folder);
                made.map_err(|reason| {
                    wrong((secret::VARIABLE, format!("is not set, and {reason}")))
                })?
            }
            None => return Err(PlaceError::NoSecret { host }),
        };
        Ok(Self {
            rank,
            world,
            local_rank: local_rank.unwrap_or(0),
            host: if one_host { LOOPBACK.to_owned() } else { host },
            port: port.map_or(PORT, |port| port as u16),
            one_host,
            secret,
        })
    }

    /// The place of a rank in a job whose ranks are all on this host and share `secret`.
    #[must_use]
    pub fn of_this_host(rank: usize, world: usize, port: u16, secret: Secret) -> Self {
        Self {
            rank,
            world,
            local_rank: rank,
            host: LOOPBACK.to_owned(),
            port,
            one_host: true,
            secret,
        }
    }

    /// Environment variables, as torchrun sets them, that give another process of this host its place, and the secret.
    #[must_use]
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        vec![
            ("RANK", self.rank.to_string()),
            ("WORLD_SIZE", self.world.to_string()),
            ("LOCAL_RANK", self.local_rank.to_string()),
            ("MASTER_ADDR", self.host.clone()),
            ("MASTER_PORT", self.port.to_string()),
            (secret::VARIABLE, self.secret.text().to_owned()),
        ]
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
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

    const SECRET: &str = "0123456789abcdef";

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
                one_host: host == LOOPBACK,
                secret: Secret::new(SECRET).expect("long enough"),
            })
        };
        let torchrun = [
            ("RANK", "9"),
            ("WORLD_SIZE", "16"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "4000"),
            ("SLURM_PROCID", "1"),
            ("LOCAL_WORLD_SIZE", "8"),
            (secret::VARIABLE, SECRET),
        ];
        assert_eq!(place(&torchrun), at(9, 16, 1, "node0", 4000));
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"),
            (secret::VARIABLE, SECRET),
        ];
        assert_eq!(place(&slurm), at(3, 4, 1, "10.0.0.1", PORT));
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "2"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
            (secret::VARIABLE, SECRET),
        ];
        assert_eq!(place(&open_mpi), at(2, 4, 2, "127.0.0.1", PORT));
        let pmi = [
            ("PMI_RANK", "0"),
            ("PMI_SIZE", "2"),
            ("MASTER_ADDR", "a"),
            (secret::VARIABLE, SECRET),
        ];
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
    fn ranks_of_one_host_stay_on_it_and_those_of_several_have_a_secret() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().display().to_string();
        let runtime = (RUNTIME_FOLDER, &folder[..]);
        let of = |more: &[(&str, &str)]| {
            let ranks = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")];
            place(&[&ranks[..], &[runtime], more].concat())
        };
        let mut secrets = Vec::new();
        for here in [
            &[("MASTER_ADDR", "localhost")][..],
            &[("MASTER_ADDR", "127.0.0.1")],
            &[("MASTER_ADDR", "::1")],
            &[("MASTER_ADDR", "node0"), ("LOCAL_WORLD_SIZE", "2")],
        ] {
            let place = of(here).expect("makes a secret");
            assert!(place.one_host && place.host == LOOPBACK);
            secrets.push(place.secret);
        }
        // Every rank finds the same secret.
        assert!(secrets.iter().all(|secret| *secret == secrets[0]));
        let slurm = [
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_STEP_NUM_NODES", "1"),
            runtime,
        ];
        assert!(place(&slurm).expect("one host").one_host);
        let alone = place(&[
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("MASTER_ADDR", "node0"),
            runtime,
        ]);
        assert!(alone.expect("meets nobody").one_host);
        let apart = &[("MASTER_ADDR", "node0"), ("LOCAL_WORLD_SIZE", "1")];
        let error = of(apart).expect_err("no secret").to_string();
        assert!(
            error.contains(secret::VARIABLE) && error.contains(secret::FILE_VARIABLE),
            "{error}"
        );
        let error = of(&[&apart[..], &[(secret::VARIABLE, "guessed")]].concat());
        let error = error.expect_err("too short").to_string();
        assert!(error.contains("has 7 characters"), "{error}");
        assert!(!error.contains("guessed"), "{error}");
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
