//! Two examples for the help of every command. A test executes them in this order, in one folder.

/// Commands, each with its two examples; the first is also shown with mistakes.
const EXAMPLES: &[[&str; 3]] = &[
    [
        "",
        "vescale-plan search --model llama3-8b --gpus 64",
        "vescale-plan doc strategies",
    ],
    [
        "search",
        "vescale-plan search --model llama3-8b --gpus 8 -o best.plan.yaml",
        "vescale-plan search --from 'tp8 recompute=full' --keep mbs --model llama3-8b --gpus 8",
    ],
    [
        "estimate",
        "vescale-plan estimate --model llama3-8b --gpus 8 --strategy tp=2,recompute=full -o mine.plan.yaml",
        "vescale-plan estimate --model llama3-8b --gpus '16x h200' --strategy 'tp2 pp2 dp4 zero1 mbs1'",
    ],
    [
        "explain",
        "vescale-plan explain best.plan.yaml",
        "vescale-plan explain best.plan.yaml --why-not tp=8",
    ],
    [
        "compare",
        "vescale-plan compare best.plan.yaml mine.plan.yaml",
        "vescale-plan compare best.plan.yaml mine.plan.yaml --report compared.html",
    ],
    [
        "size",
        "vescale-plan size --model llama3-8b --gpus 4,8,16 --tokens 1T --price 2.5",
        "vescale-plan size --model gpt2 --cluster 'a100-80gb x 4 per node, 200 Gb/s' --gpus 1,2,4",
    ],
    [
        "replan",
        "vescale-plan replan best.plan.yaml --lost 4",
        "vescale-plan replan best.plan.yaml --lost 4 --keep tp --checkpoint 40GB/s -o left.plan.yaml",
    ],
    [
        "validate",
        "vescale-plan validate",
        "vescale-plan validate --only llama3 --tolerance 0.5",
    ],
    [
        "report",
        "vescale-plan report mine.plan.yaml",
        "vescale-plan report mine.plan.yaml -o page.html --tokens 15T",
    ],
    [
        "trace",
        "vescale-plan trace best.plan.yaml",
        "vescale-plan trace best.plan.yaml -o step.json",
    ],
    [
        "run",
        "vescale-plan run examples/nanogpt-tp2-pp2.yaml --steps 2",
        "vescale-plan run examples/nanogpt-single.yaml --steps 2 --numerics exact --checkpoints saved",
    ],
    [
        "profile",
        "vescale-plan profile examples/nanogpt-single.yaml",
        "vescale-plan profile examples/nanogpt-tp2-pp2.yaml -o other-profile.yaml",
    ],
    [
        "checkpoint",
        "vescale-plan checkpoint inspect saved",
        "vescale-plan checkpoint verify saved",
    ],
    [
        "checkpoint inspect",
        "vescale-plan checkpoint inspect saved",
        "vescale-plan checkpoint inspect saved --json",
    ],
    [
        "checkpoint verify",
        "vescale-plan checkpoint verify saved",
        "vescale-plan checkpoint verify saved --json",
    ],
    [
        "checkpoint reshard",
        "vescale-plan checkpoint reshard saved --plan examples/nanogpt-tp2-pp2.yaml -o resharded",
        "vescale-plan checkpoint reshard saved --plan examples/nanogpt-cp2-dp2.yaml -o other --json",
    ],
    [
        "checkpoint export",
        "vescale-plan checkpoint export saved -o weights.safetensors",
        "vescale-plan checkpoint export saved -o more.safetensors --json",
    ],
    [
        "export",
        "vescale-plan export best.plan.yaml --to megatron-lm",
        "vescale-plan export best.plan.yaml --to megatron-lm --launcher slurm -o launch",
    ],
    [
        "import",
        "vescale-plan import examples/llama/config.json --gpus 8",
        "vescale-plan import launch/megatron_args.sh --model llama3-8b --gpus 8",
    ],
    [
        "diagnose",
        "vescale-plan diagnose train.log --plan best.plan.yaml",
        "vescale-plan diagnose train.log --plan best.plan.yaml --calibrate ours.yaml",
    ],
    [
        "calibrate",
        "vescale-plan calibrate train.log --plan best.plan.yaml -o measured.yaml",
        "vescale-plan calibrate train.log --plan best.plan.yaml --warmup 1 -o later.yaml",
    ],
    [
        "models",
        "vescale-plan models",
        "vescale-plan models --json",
    ],
    [
        "clusters",
        "vescale-plan clusters",
        "vescale-plan clusters --json",
    ],
    [
        "runtimes",
        "vescale-plan runtimes",
        "vescale-plan runtimes --json",
    ],
    [
        "config",
        "vescale-plan config",
        "VESCALE_PLAN_SEQ=4k vescale-plan config --json",
    ],
    ["doc", "vescale-plan doc", "vescale-plan doc constraints"],
    [
        "schema",
        "vescale-plan schema plan",
        "vescale-plan schema cluster",
    ],
    [
        "completions",
        "vescale-plan completions bash > vescale-plan.bash",
        "vescale-plan completions zsh > _vescale-plan",
    ],
    [
        "man",
        "vescale-plan man > vescale-plan.1",
        "vescale-plan man search > vescale-plan-search.1",
    ],
];

/// Two examples of a command, which is given by its words after `vescale-plan`; of the tool as a whole if there is no such command.
pub(crate) fn of(command: &str) -> &'static [&'static str; 2] {
    let found = EXAMPLES.iter().find(|[name, ..]| *name == command);
    let [_, examples @ ..] = found.unwrap_or(&EXAMPLES[0]);
    examples
}

/// A correct example of the command that was typed, if it is known.
pub(crate) fn typed() -> &'static str {
    of(&super::words::given().nth(1).unwrap_or_default())[0]
}

/// The program with the command that was typed.
pub(crate) fn command() -> String {
    let command = super::words::given().nth(1).unwrap_or_default();
    format!("vescale-plan {command}").trim_end().to_owned()
}

/// The end of a command's help.
pub(crate) fn help(command: &str) -> String {
    let lines = of(command).map(|line| format!("  {line}"));
    format!("Examples:\n{}", lines.join("\n"))
}
