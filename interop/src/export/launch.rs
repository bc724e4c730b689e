//! Scripts that start the ranks: `torchrun` on every node, a Slurm batch script, a Kubernetes job.

use super::inputs::{PLACEHOLDER, Unfilled};
use super::job::{ExportedFile, Job, Launcher, comments};

/// How a training system is started with an exported configuration.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    /// Shell lines that run first; `$HERE` is the folder of the exported files.
    pub(crate) setup: Vec<String>,
    /// The launcher that starts a process per device.
    pub(crate) starter: Starter,
    /// The training program that every rank runs and its arguments, quoted for a shell.
    pub(crate) arguments: String,
}

impl Program {
    /// A program that torchrun starts.
    pub(crate) fn torchrun(setup: Vec<String>, arguments: String) -> Self {
        let starter = Starter::Torchrun;
        Self {
            setup,
            starter,
            arguments,
        }
    }
}

/// The launcher that starts a process per device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Starter {
    /// `torchrun`, with the number of processes on its command line.
    Torchrun,
    /// `accelerate launch`, with the numbers of nodes and processes on its command line.
    Accelerate,
}

/// Default port of the rendezvous, as torchrun's; except on Kubernetes, `MASTER_PORT` overrides it.
const PORT: u16 = 29500;

/// Folder in a pod where the files are mounted.
const MOUNT: &str = "/etc/vescale-plan";

/// The launch script or manifest; it stops while an input is still to be filled in.
pub(crate) fn script(
    job: &Job<'_>,
    launcher: Launcher,
    mut program: Program,
    files: &[ExportedFile],
    unfilled: &[Unfilled],
) -> ExportedFile {
    let left_open = unfilled.iter().any(|u| u.placeholder);
    let with_placeholders = files.iter().filter(|file| file.text.contains(PLACEHOLDER));
    let names: Vec<String> = with_placeholders
        .map(|file| format!("\"$HERE/{}\"", file.name))
        .collect();
    if left_open && !names.is_empty() {
        let guard = format!(
            "if grep -n '^[^#]*{PLACEHOLDER}' {} >&2; then\n  \
             echo \"fill in what these lines leave open\" >&2\n  exit 1\nfi",
            names.join(" ")
        );
        program.setup.insert(0, guard);
    }
    let top = comments(job, unfilled);
    let (text, executable) = match launcher {
        Launcher::Torchrun => (torchrun(job, &program, &top), true),
        Launcher::Slurm => (slurm(job, &program, &top), true),
        Launcher::Kubernetes => (kubernetes(job, &program, files, &top), false),
    };
    ExportedFile {
        name: launcher.file().to_owned(),
        text,
        executable,
    }
}

/// Number of nodes, and of devices on each.
fn shape(job: &Job<'_>) -> (u64, u64) {
    let each = job.cluster.gpus_per_node.min(job.workload.gpus);
    (job.workload.gpus.div_ceil(each), each)
}

/// Value of Slurm's `--segment`: nodes to allocate together in one scale-up domain, as predictions
/// assume. `None` if a domain is a node, or if the value does not divide the number of nodes, which
/// Slurm requires (`sbatch`, `--segment`).
fn segment(job: &Job<'_>) -> Option<u64> {
    let cluster = job.cluster;
    let (nodes, _) = shape(job);
    let joins_nodes = cluster.pools.is_none() && cluster.scale_up_domain > cluster.gpus_per_node;
    if nodes == 1 || !joins_nodes {
        return None;
    }
    let of_domain = cluster.domain(job.workload.gpus).gpus / cluster.gpus_per_node;
    Some(of_domain.min(nodes)).filter(|segment| nodes.is_multiple_of(*segment))
}

/// The command that starts this node's ranks.
fn command(job: &Job<'_>, program: &Program) -> String {
    let (nodes, each) = shape(job);
    let gpus = job.workload.gpus;
    match program.starter {
        Starter::Torchrun => format!(
            "torchrun --nnodes {nodes} --nproc-per-node {each} --node-rank \"$NODE_RANK\" \\\n  \
             --master-addr \"$MASTER_ADDR\" --master-port \"$MASTER_PORT\" \\\n  {}",
            program.arguments
        ),
        Starter::Accelerate => format!(
            "accelerate launch --num_machines {nodes} --num_processes {gpus} --machine_rank \"$NODE_RANK\" \\\n  \
             --main_process_ip \"$MASTER_ADDR\" --main_process_port \"$MASTER_PORT\" \\\n  {}",
            program.arguments
        ),
    }
}

fn torchrun(job: &Job<'_>, program: &Program, top: &str) -> String {
    let (nodes, _) = shape(job);
    let mut text = format!("#!/usr/bin/env bash\n{top}");
    if nodes > 1 {
        text.push_str(&format!(
            "# Start it on each of the {nodes} nodes with NODE_RANK=0 … {} and MASTER_ADDR set to the first.\n",
            nodes - 1
        ));
    }
    text.push_str("set -euo pipefail\n");
    text.push_str("HERE=\"$(cd \"$(dirname \"${BASH_SOURCE[0]}\")\" && pwd)\"\n");
    text.push_str("NODE_RANK=\"${NODE_RANK:-0}\"\n");
    text.push_str("MASTER_ADDR=\"${MASTER_ADDR:-localhost}\"\n");
    text.push_str(&format!("MASTER_PORT=\"${{MASTER_PORT:-{PORT}}}\"\n"));
    for line in &program.setup {
        text.push_str(&format!("{line}\n"));
    }
    text.push_str(&format!("exec {}\n", command(job, program)));
    text
}

fn slurm(job: &Job<'_>, program: &Program, top: &str) -> String {
    let (nodes, each) = shape(job);
    let segment = segment(job).map_or_else(String::new, |segment| {
        format!("#SBATCH --segment={segment}\n")
    });
    let mut text = format!(
        "#!/usr/bin/env bash\n\
         #SBATCH --job-name={}\n\
         #SBATCH --nodes={nodes}\n\
         {segment}\
         #SBATCH --ntasks-per-node=1\n\
         #SBATCH --gpus-per-node={each}\n\
         #SBATCH --exclusive\n\
         {}\
         set -euo pipefail\n\
         # Slurm runs a copy of this script; the files lie where it was submitted from.\n\
         HERE=\"${{HERE:-$SLURM_SUBMIT_DIR}}\"\n\
         export HERE\n\
         MASTER_ADDR=\"$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)\"\n\
         export MASTER_ADDR\n\
         export MASTER_PORT=\"${{MASTER_PORT:-{PORT}}}\"\n",
        label(&job.model.name),
        top,
    );
    // One task per node; each reads its node's rank from its own environment.
    text.push_str("srun --kill-on-bad-exit=1 bash -c '\n");
    text.push_str("set -euo pipefail\nNODE_RANK=\"$SLURM_NODEID\"\n");
    for line in &program.setup {
        text.push_str(&format!("{}\n", line.replace('\'', r"'\''")));
    }
    let command = command(job, program).replace('\'', r"'\''");
    text.push_str(&format!("exec {command}\n' launch \"$@\"\n"));
    text
}

fn kubernetes(job: &Job<'_>, program: &Program, files: &[ExportedFile], top: &str) -> String {
    let (nodes, each) = shape(job);
    let name = label(&job.model.name);
    let mut text = format!(
        "{}\
         # IMAGE is yours: it holds the training system, its data and its tokenizer.\n\
         apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\nspec:\n  clusterIP: None\n  \
         selector:\n    job-name: {name}\n---\n\
         apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata:\n",
        top,
    );
    for file in files {
        text.push_str(&format!("  {}: |\n{}", file.name, indented(&file.text, 4)));
    }
    let mut shell = format!(
        "set -euo pipefail\nHERE={MOUNT}\nNODE_RANK=\"$JOB_COMPLETION_INDEX\"\n\
         MASTER_ADDR=\"{name}-0.{name}\"\nMASTER_PORT=\"{PORT}\"\n"
    );
    for line in &program.setup {
        shell.push_str(&format!("{line}\n"));
    }
    shell.push_str(&format!("exec {}\n", command(job, program)));
    text.push_str(&format!(
        "---\napiVersion: batch/v1\nkind: Job\nmetadata:\n  name: {name}\nspec:\n  \
         completionMode: Indexed\n  completions: {nodes}\n  parallelism: {nodes}\n  backoffLimit: 0\n  \
         template:\n    spec:\n      subdomain: {name}\n      restartPolicy: Never\n      containers:\n      \
         - name: train\n        image: IMAGE\n        command:\n        - bash\n        - -c\n        - |\n{}        \
         resources:\n          limits:\n            nvidia.com/gpu: {each}\n        volumeMounts:\n        \
         - name: plan\n          mountPath: {MOUNT}\n        - name: shm\n          mountPath: /dev/shm\n      \
         volumes:\n      - name: plan\n        configMap:\n          name: {name}\n      \
         # NCCL between the processes of a pod needs shared memory.\n      \
         - name: shm\n        emptyDir:\n          medium: Memory\n",
        indented(&shell, 10),
    ));
    text
}

fn indented(text: &str, by: usize) -> String {
    let pad = " ".repeat(by);
    text.lines().fold(String::new(), |mut all, line| {
        if !line.is_empty() {
            all.push_str(&pad);
            all.push_str(line);
        }
        all.push('\n');
        all
    })
}

/// A name valid for DNS and Slurm: lower-case letters, digits and hyphens, at most 50.
fn label(name: &str) -> String {
    let letters: String = name
        .to_lowercase()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .take(50)
        .collect();
    let label = letters.trim_matches('-');
    if label.is_empty() {
        "train".to_owned()
    } else {
        label.to_owned()
    }
}
