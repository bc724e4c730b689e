//! The nodes, GPUs and processes that a launch script requests in its `#SBATCH` lines, and the environment variables that Slurm
//! sets from them.

/// What a script requests of Slurm; `None` where its `#SBATCH` lines give no number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Number of nodes (`--nodes`).
    pub nodes: Option<u64>,
    /// Number of devices of each node (`--gpus-per-node`, `--gres=gpu:8`).
    pub gpus_per_node: Option<u64>,
    /// Number of devices in all nodes together (`--gpus`).
    pub gpus: Option<u64>,
    /// Number of processes that Slurm starts on each node (`--ntasks-per-node`).
    pub tasks_per_node: Option<u64>,
    /// Number of processes that Slurm starts in all (`--ntasks`).
    pub tasks: Option<u64>,
}

impl Job {
    /// Reads the `#SBATCH` lines above the first command of a script; Slurm ignores later ones (sbatch's manual page). In such
    /// a line, a further `#` starts a comment.
    pub(super) fn of(text: &str) -> Self {
        let mut job = Self::default();
        let header = text
            .lines()
            .map(str::trim)
            .take_while(|line| line.is_empty() || line.starts_with('#'));
        for options in header.filter_map(|line| line.strip_prefix("#SBATCH")) {
            let options = options.split('#').next().unwrap_or("");
            let words: Vec<&str> = options.split([' ', '\t', '=']).collect();
            let mut words = words.into_iter().filter(|word| !word.is_empty());
            while let (Some(name), Some(value)) = (words.next(), words.next()) {
                job.set(name, value);
            }
        }
        job
    }

    /// Sets an option's field. A device may come before the number (`h100:8`; `gpu:` in `--gres`).
    fn set(&mut self, name: &str, value: &str) {
        let devices = value.strip_prefix("gpu:").filter(|_| name == "--gres");
        let slot = match name {
            "--nodes" | "-N" => &mut self.nodes,
            "--gpus-per-node" => &mut self.gpus_per_node,
            "--gres" if devices.is_some() => &mut self.gpus_per_node,
            "--gpus" | "-G" => &mut self.gpus,
            "--ntasks-per-node" => &mut self.tasks_per_node,
            "--ntasks" | "-n" => &mut self.tasks,
            _ => return,
        };
        let number = value.rsplit(':').next().and_then(|text| text.parse().ok());
        *slot = number.or(*slot);
    }

    /// Names and values of the environment variables that Slurm sets for the job (sbatch's manual page).
    pub(super) fn variables(self) -> impl Iterator<Item = (&'static str, u64)> {
        let tasks = (self.nodes.zip(self.tasks_per_node)).and_then(|(n, each)| n.checked_mul(each));
        let tasks = self.tasks.or(tasks);
        let all = [
            ("SLURM_NNODES", self.nodes),
            ("SLURM_JOB_NUM_NODES", self.nodes),
            ("SLURM_GPUS_ON_NODE", self.gpus_per_node),
            ("SLURM_GPUS_PER_NODE", self.gpus_per_node),
            ("SLURM_GPUS", self.gpus),
            ("SLURM_NTASKS_PER_NODE", self.tasks_per_node),
            ("SLURM_NTASKS", tasks),
            ("SLURM_NPROCS", tasks),
        ];
        all.into_iter()
            .filter_map(|(name, value)| Some((name, value?)))
    }
}
