//! Launch scripts of Megatron-LM: the results of their conditions, calculations and options.

use interop::import::{Document, Given, ImportError, Imported, import, of_file};

const LLAMA_70B: &str = "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --rotary-base 500000";
const LLAMA_8B: &str = "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --rotary-base 1000000";
const LLAMA_405B: &str = "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --group-query-attention --num-query-groups 8 --rotary-base 500000";
const COMMON: &str = "--seq-length 8192 --max-position-embeddings 8192 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 --micro-batch-size 1 --use-distributed-optimizer --sequence-parallel --no-check-for-nan-in-loss-and-grad";

/// A script with these lines, then a command that starts 64 ranks with these options.
fn script(lines: &str, sizes: &str, options: &str) -> String {
    format!(
        "{lines}\ntorchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py {sizes} {COMMON} {options}\n"
    )
}

fn read(text: &str) -> Result<(String, Imported, String), ImportError> {
    let document = Document::read(text, "run.sh", None, &|_| None)?;
    let found = of_file(&document)?;
    let given = Given {
        gpus_per_node: 8,
        model: &found.model,
        gpus: None,
        seq_len: None,
    };
    let imported = import(&document, &given)?;
    let runtime = imported.runtime(&document).to_owned();
    Ok((found.name, imported, runtime))
}

/// Sizes that a script with these lines sets: tensor and pipeline parallelism, batch, whether
/// products are in 8 bits.
fn sizes(lines: &str) -> Result<(u64, u64, u64, bool), ImportError> {
    let options = "--global-batch-size ${GBS:-64} --tensor-model-parallel-size ${TP:-8} --pipeline-model-parallel-size ${PP:-4} ${X[@]}";
    let (_, read, _) = read(&script(lines, LLAMA_70B, options))?;
    let w = read.workload;
    let eight_bits = w.precision == catalog::Precision::Fp8;
    Ok((
        read.decisions.tp,
        read.decisions.pp,
        w.global_batch,
        eight_bits,
    ))
}

#[test]
fn conditions_are_decided_on_what_the_script_states() {
    for (lines, expected) in [
        ("", (8, 4, 64, false)),
        (
            "D=bf16; X=()\nif [[ \"$D\" == \"fp8\" ]]; then\n X+=(\"--fp8-format\" \"hybrid\")\nfi",
            (8, 4, 64, false),
        ),
        (
            "D=fp8; X=()\nif [[ \"$D\" == \"fp8\" ]]; then\n X+=(\"--fp8-format hybrid\")\nfi",
            (8, 4, 64, true),
        ),
        ("PP=4; if [ $PP -gt 8 ]; then TP=2; fi", (8, 4, 64, false)),
        (
            "PP=4; if [ $PP -ge 4 ]; then TP=2; else TP=4; fi",
            (2, 4, 64, false),
        ),
        (
            "if [ \"$USE_FP8\" = \"1\" ]; then X+=(--fp8-format hybrid); fi",
            (8, 4, 64, false),
        ),
        (
            "if [ -z ${TP} ]\nthen\n  TP=2 # as here\nfi",
            (2, 4, 64, false),
        ),
        (
            "M=${1:-8b}\ncase \"$M\" in\n 70b|405b) TP=4 ;;\n 8*)\n  TP=2\n  ;;\n *) TP=1;;\nesac",
            (2, 4, 64, false),
        ),
        (
            "case 70b in (8b) TP=1;; (7?b) TP=4;; esac",
            (4, 4, 64, false),
        ),
        (
            "A=y; if [ ! -n \"$B\" ] && [[ $A == y* && ( -z $B || -f x ) ]]; then TP=4; fi",
            (4, 4, 64, false),
        ),
        (
            "if [ \"$A\" = x ]; then TP=2\nelif test $A -o 1 -lt 2; then TP=4; else TP=1; fi",
            (4, 4, 64, false),
        ),
        ("N=2; [ $N -eq 1 ] && TP=1 || TP=4", (4, 4, 64, false)),
        (
            "N=2; if (( N * 4 >= 8 && N != 3 )); then TP=4; fi; (( PP = N ))",
            (4, 2, 64, false),
        ),
        (
            "if false; then if true; then TP=2; fi; else :; fi; : ${PP:=2}",
            (8, 2, 64, false),
        ),
        (
            "while [[ $# -gt 0 ]]; do case $1 in --tp) TP=$2; shift 2;; esac; done",
            (8, 4, 64, false),
        ),
        (
            "for arg in \"$@\"; do TP=2; done\nusage() { echo \"if you\"; exit 1; }",
            (8, 4, 64, false),
        ),
        (
            "cat <<EOF > note.txt\nif you don't\nEOF\nexport TP=2; declare -r PP=2",
            (2, 2, 64, false),
        ),
        (
            "if [ ! -f pretrain_gpt.py ]; then echo no; exit 1; fi",
            (8, 4, 64, false),
        ),
    ] {
        assert_eq!(sizes(lines), Ok(expected), "{lines}");
    }
}

#[test]
fn arithmetic_is_calculated() {
    for (lines, batch) in [
        (
            "WORLD_SIZE=64; TP=2; PP=4; GBS=$((WORLD_SIZE / TP / PP * 32))",
            256,
        ),
        ("GBS=$((64/2*2))", 64),
        ("W=64; TP=2; PP=4; DP=$((W/TP/PP)); GBS=$((DP*32))", 256),
        (
            "N=8; GBS=$(( ($N + 8) * ${N} % 100 - 4 - -4 + ${M:-36} ))",
            64,
        ),
    ] {
        assert_eq!(sizes(lines).map(|found| found.2), Ok(batch), "{lines}");
    }
}

#[test]
fn what_a_script_does_not_state_is_named() {
    for (lines, expected) in [
        (
            "case $1 in\n70b) TP=4;;\n8b) TP=2;;\nesac",
            &[
                "run.sh:1",
                "case $1",
                "--tensor-model-parallel-size",
                "in place of `$1`",
            ][..],
        ),
        (
            "\nN=$(nvidia-smi -L | wc -l)\nif [ $N -gt 4 ]; then TP=4; fi",
            &["run.sh:3", "[ $N -gt 4 ]", "nvidia-smi"],
        ),
        (
            "if [ -f big ]; then\n if [ -f bigger ]; then PP=2; fi\nfi",
            &["run.sh:2", "[ -f bigger ]", "`true` or `false`"],
        ),
        (
            "if grep -q x y; then TP=4; fi",
            &["run.sh:1", "grep -q x y"],
        ),
        ("[ -d z ] && TP=4", &["run.sh:1", "[ -d z ]"]),
        (
            "GBS=$((WORLD_SIZE / 8 * 32))",
            &["run.sh:2", "--global-batch-size", "does not set WORLD_SIZE"],
        ),
        ("D=$((NODES/8)); GBS=$((D*32))", &["does not set NODES"]),
        ("GBS=$((8/0))", &["$((8/0))"]),
        ("if true; then\nTP=2", &["run.sh:1", "no `fi`"]),
    ] {
        let error = sizes(lines).expect_err(lines).to_string();
        for part in expected {
            assert!(error.contains(part), "{lines}: {error}");
        }
    }
    let nested = "if true; then\n".repeat(10_000);
    assert!(sizes(&nested).is_err());
    let many = "if [ -f x ]; then TP=2; fi\n".repeat(1000);
    assert!(sizes(&many).is_err());
}

#[test]
fn a_condition_that_changes_nothing_of_the_plan_is_noted() {
    let text = script(
        "if [ -f x ]; then X=(--save y); else X=(--load z); fi",
        LLAMA_70B,
        "${X[@]}",
    );
    let (_, read, _) = read(&text).expect("imports");
    let expected = "run.sh:1: the script does not decide `[ -f x ]`, taken as false: --load, --save would differ, the strategy would not";
    assert!(
        read.notes.iter().any(|note| note == expected),
        "{:?}",
        read.notes
    );
}

#[test]
fn the_vocabulary_says_which_model_it_is() {
    for (sizes, options, model) in [
        (LLAMA_8B, "--vocab-size 128256", "meta-llama-3-8b"),
        (
            LLAMA_8B,
            "--vocab-size 128256 --use-rope-scaling",
            "llama3-8b",
        ),
        (LLAMA_8B, "--vocab-size 32000", "mistral-7b"),
        (
            LLAMA_8B,
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B",
            "meta-llama-3-8b",
        ),
        (LLAMA_70B, "--vocab-size 128256", "meta-llama-3-70b"),
        (
            LLAMA_70B,
            "--padded-vocab-size 129024 --tensor-model-parallel-size 8",
            "meta-llama-3-70b",
        ),
        (
            LLAMA_70B,
            "--vocab-size 32000 --max-position-embeddings 4096 --seq-length 4096",
            "llama2-70b",
        ),
        (LLAMA_70B, "--vocab-size 50000", "run"),
    ] {
        let found = read(&script("", sizes, options)).map(|(name, ..)| name);
        assert_eq!(found.as_deref(), Ok(model), "{options}");
    }
    let text = script("", LLAMA_70B, "--vocab-size 50000");
    let document = Document::read(&text, "run.sh", None, &|_| None).expect("well-formed");
    let differs = of_file(&document)
        .expect("a model")
        .differs
        .unwrap_or_default();
    assert!(
        differs.contains("--vocab-size: 50000, but model meta-llama"),
        "{differs}"
    );
    let given = Given {
        gpus_per_node: 8,
        model: &catalog::load::model("meta-llama-3-70b").expect("preset"),
        gpus: None,
        seq_len: None,
    };
    let error = import(&document, &given)
        .expect_err("another model")
        .to_string();
    assert!(
        error.starts_with("run.sh:2: `--vocab-size`: 50000"),
        "{error}"
    );
}

#[test]
fn options_that_are_planned_otherwise_are_noted() {
    for (options, note, runtime) in [
        (
            "--use-torch-fsdp2",
            Some("--use-torch-fsdp2 is planned as ZeRO-3"),
            "megatron-fsdp",
        ),
        (
            "--fp8-format hybrid --fp8-param-gather",
            Some("--fp8-param-gather is planned as in NeMo"),
            "nemo",
        ),
        (
            "--attention-backend unfused",
            Some("--attention-backend unfused is planned as fused attention"),
            "megatron-core",
        ),
        (
            "--attention-backend local",
            Some("--attention-backend local"),
            "megatron-core",
        ),
        (
            "--recompute-granularity selective --recompute-modules layernorm",
            Some("--recompute-modules layernorm is planned as no recomputation"),
            "megatron-core",
        ),
        (
            "--optimizer muon",
            Some("--optimizer muon is planned as Adam"),
            "megatron-core",
        ),
        (
            "--transformer-impl local",
            Some("--transformer-impl local"),
            "megatron-core",
        ),
        (
            "--tensor-parallel-size 4",
            Some("left out: --tensor-parallel-size (run.sh:2"),
            "megatron-core",
        ),
        (
            "--attention-backend flash --optimizer adam --cuda-graph-impl local",
            None,
            "megatron-core",
        ),
    ] {
        let text = script(
            "",
            LLAMA_70B,
            &format!("--vocab-size 128256 --use-rope-scaling {options}"),
        );
        let (_, read, found) = read(&text).unwrap_or_else(|error| panic!("{options}: {error}"));
        assert_eq!(found, runtime, "{options}");
        let notes = read.notes_under(&catalog::load::runtime(runtime).expect("preset"));
        match note {
            Some(note) => assert!(notes.iter().any(|n| n.contains(note)), "{notes:?}"),
            None => assert_eq!(notes, Vec::<String>::new(), "{options}"),
        }
    }
    let text = script("", LLAMA_70B, "--tensor-model-paralell-size 4");
    let error = read(&text).expect_err("misspelt").to_string();
    assert_eq!(
        error,
        "run.sh:2: `--tensor-model-paralell-size`: unknown to megatron-lm; did you mean `--tensor-model-parallel-size`?"
    );
}

/// Four pipeline ranks of two virtual stages, and eight micro-batches.
const INTERLEAVED: &str = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 128 --microbatch-group-size-per-virtual-pipeline-stage";
const GROUP: &str = "--microbatch-group-size-per-virtual-pipeline-stage";
const LLAMA3: &str = "--vocab-size 128256 --use-rope-scaling";

#[test]
#[rustfmt::skip]
fn what_a_plan_cannot_express_is_noted() {
    let megatron = catalog::load::runtime("megatron-core").expect("preset");
    for (options, note) in [
        (&format!("{INTERLEAVED} 8")[..], &format!("{GROUP} 8 is planned as 4, the number of pipeline ranks: Megatron-LM keeps activations of up to 4 more micro-batches of a virtual stage on every rank")[..]),
        (&format!("{INTERLEAVED} 4"), ""),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*20|t*30|t*30m|L'", "layers of multi-token prediction (m) are planned on the last stage, beside the head (L)"),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*20|t*30|t*30|mL'", ""),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 4", "--recompute-num-layers 4 is planned as 1: Megatron-LM keeps only one layer input in 4, and holds what 4 layers save at once in backward"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ""),
        ("--fp32-residual-connection", "--fp32-residual-connection is planned as 16 bits between layers"),
        ("--fine-grained-activation-offloading --offload-modules core_attn", "--fine-grained-activation-offloading is planned as activations that stay on the device"),
        ("--fp8-format hybrid --fp8-recipe blockwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2", "--first-last-layers-bf16 is planned as 8 bits in the first and last layers too"),
        ("--first-last-layers-bf16", ""),
        ("--no-gradient-accumulation-fusion", "--no-gradient-accumulation-fusion is planned as gradients that matrix products add up themselves"),
        ("--use-megatron-fsdp --no-gradient-accumulation-fusion", ""),
        ("--ddp-bucket-size 40000000", "--ddp-bucket-size 40000000 is planned as 1000000 elements for each data-parallel rank"),
        ("--tensor-model-parallel-size 8 --ddp-bucket-size 10000000", "--ddp-bucket-size 10000000 is planned as 40000000 elements"),
        ("--tensor-model-parallel-size 8 --ddp-bucket-size 10000000 --ddp-bucket-size 40000000", ""),
        ("--tensor-model-parallel-size 4 --tp-comm-overlap --disable-tp-comm-bulk-wgrad", "--disable-tp-comm-bulk-wgrad is planned as overlapped like the rest of --tp-comm-overlap"),
        ("--moe-expert-capacity-factor 1.0 --no-bias-gelu-fusion --mlp-chunks-for-training 1", ""),
        ("--no-bias-swiglu-fusion", "--no-bias-swiglu-fusion is planned as the fused kernel of SwiGLU"),
        ("--step-batch-size-schedule '0:64 200B:128'", "--step-batch-size-schedule: the plan uses the schedule's last batch, 128"),
        ("--rampup-batch-size 64 64 1000 --global-batch-size 128", "--rampup-batch-size has no part in a strategy and is left out"),
        ("--context-parallel-size 2 --cp-comm-type a2a a2a", ""),
        ("--sft --sft", "--sft is planned as attention over whole sequences, as the script does not say how long documents are; `search --from` with this file takes --lengths, to plan attention within them"),
    ] {
        let text = script("", LLAMA_70B, &format!("{LLAMA3} {options}"));
        let (_, read, _) = read(&text).unwrap_or_else(|error| panic!("{options}: {error}"));
        let expected: Vec<String> = [note].into_iter().filter(|note| !note.is_empty()).map(|note| format!("run.sh:2: {note}")).collect();
        assert_eq!(read.notes_under(&megatron), expected, "{options}");
    }
    for (options, note) in [
        ("--moe-permute-fusion --moe-grouped-gemm --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity", "run.sh:2: --moe-expert-capacity-factor 1 is planned as experts that take all their tokens, without padding"),
        ("--moe-permute-fusion", "run.sh: the plan assumes --moe-grouped-gemm, which the script does not set: without it experts run one after another (SequentialMLP), which takes longer"),
        ("--moe-grouped-gemm", "run.sh: the plan assumes --moe-permute-fusion, which the script does not set: without it tokens are sorted by several kernels, which takes longer"),
    ] {
        let experts = format!("--num-experts 8 --vocab-size 1024 {options}");
        let (_, read, _) = read(&script("", LLAMA_70B, &experts)).expect("imports");
        assert_eq!(read.notes_under(&megatron), [note], "{options}");
    }
}

/// Megatron-LM checks losses and gradients for NaN and Inf unless the script says otherwise.
#[test]
fn checks_for_nan_that_are_left_on_are_noted() {
    const OFF: &str = " --no-check-for-nan-in-loss-and-grad";
    let both = "the host waits for the loss of every micro-batch, and every step reads all gradients once more, about 11 ms for 8 \
                billion parameters on an H100, and the host waits for every bucket of them";
    let of_losses = "the host waits for the loss of every micro-batch";
    for (precision, options, cost) in [
        (" --bf16", OFF, None),
        (" --bf16", "", Some(both)),
        (" --bf16", " --use-megatron-fsdp", Some(of_losses)),
        (" --fp16", "", None),
        (" --fp16", " --loss-scale 1024", Some(both)),
    ] {
        let text = script("", LLAMA_70B, LLAMA3).replace(OFF, options);
        let text = text.replace(" --bf16", precision);
        let (_, read, _) = read(&text).unwrap_or_else(|error| panic!("{options}: {error}"));
        let expected = cost.map(|cost| {
            format!("run.sh: the plan assumes{OFF}, which the file does not set: training then checks for NaN and Inf, which takes longer: {cost}")
        });
        assert_eq!(read.notes, Vec::from_iter(expected), "{precision}{options}");
    }
}

/// A note names each kernel that the script asks for and the runtime of the prediction lacks.
#[test]
fn kernels_are_noted_where_the_runtime_has_others() {
    let apart = "--no-bias-swiglu-fusion --no-rope-fusion";
    for (options, runtime, planned) in [
        (apart, "deepspeed", &[][..]),
        (
            apart,
            "megatron-core",
            &["the fused kernel of rotation", "the fused kernel of SwiGLU"],
        ),
        ("--cross-entropy-loss-fusion", "llm-foundry", &[]),
        (
            "--cross-entropy-loss-fusion",
            "megatron-core",
            &["a loss of several kernels"],
        ),
        ("--attention-backend flash", "megatron-core", &[]),
        ("--attention-backend unfused", "vescale", &[]),
        (
            "--attention-backend flash",
            "vescale",
            &["unfused attention"],
        ),
    ] {
        let text = script("", LLAMA_70B, &format!("{LLAMA3} {options}"));
        let (_, read, _) = read(&text).unwrap_or_else(|error| panic!("{options}: {error}"));
        let notes = read.notes_under(&catalog::load::runtime(runtime).expect("preset"));
        let found = notes
            .iter()
            .filter_map(|note| note.split(" is planned as ").nth(1));
        assert_eq!(found.collect::<Vec<_>>(), planned, "{options} {runtime}");
    }
}

/// Megatron-LM accepts no batch size beside a schedule of batch sizes.
#[test]
fn the_last_batch_of_a_schedule_is_planned() {
    let read = |schedule: &str| {
        let options = format!("{LLAMA3} --step-batch-size-schedule {schedule}");
        let (_, read, _) = read(&script("", LLAMA_70B, &options))?;
        Ok::<_, ImportError>(read.workload.global_batch)
    };
    assert_eq!(read("'0:64 200B:128'"), Ok(128));
    let error = read("0-64").expect_err("no schedule").to_string();
    let expected = "run.sh:2: `--step-batch-size-schedule`: `0-64` is not batches by tokens, such as \"0:384 200B:768\"";
    assert_eq!(error, expected);
}

/// The name of the training program tells which tokenizer it uses and which kind of model it
/// trains, where its options do not.
#[test]
fn the_program_says_what_its_options_do_not() {
    let sizes = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --max-position-embeddings 1024 --seq-length 1024 --micro-batch-size 4 --bf16";
    let of = |program: &str, options: &str| {
        let text = format!("torchrun --nproc_per_node 8 {program} {sizes} {options}\n");
        let document = Document::read(&text, "run.sh", None, &|_| None).expect("well-formed");
        of_file(&document)
            .map(|found| found.model.vocab)
            .map_err(|error| error.to_string())
    };
    let unsaid = "run.sh: the vocabulary is not given; its rows are the tokenizer's; give --vocab-size in the script, or --model";
    let another = |program: &str| {
        format!(
            "run.sh:1: `{program}`: makes a model that is no decoder-only transformer of attention layers"
        )
    };
    for (program, options, expected) in [
        ("pretrain_gpt.py", "", Ok(50_304)),
        (
            "Megatron-LM/pretrain_gpt.py",
            "--tokenizer-type Llama2Tokenizer",
            Ok(32_000),
        ),
        (
            "pretrain_gpt.py",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model $T",
            Err(unsaid.to_owned()),
        ),
        ("pretrain_gpt.py", "--vocab-size 1000", Ok(1024)),
        ("train.py", "", Err(unsaid.to_owned())),
        ("pretrain_bert.py", "", Err(another("pretrain_bert.py"))),
        (
            "mlm/pretrain_vision_classify.py",
            "--vocab-size 1000",
            Err(another("pretrain_vision_classify.py")),
        ),
        (
            "pretrain_t5.py",
            "--vocab-size 1000",
            Err(another("pretrain_t5.py")),
        ),
        ("pretrain_llama.py", "--vocab-size 1000", Ok(1024)),
    ] {
        assert_eq!(of(program, options), expected, "{program} {options}");
    }
}

#[test]
#[rustfmt::skip]
fn what_a_plan_cannot_stand_for_is_refused() {
    for (options, key, message) in [
        (&format!("{INTERLEAVED} 5 --global-batch-size 160")[..], GROUP, "plans have groups of 4, the number of pipeline ranks, which do not divide the 10 micro-batches of a step"),
        (&format!("{INTERLEAVED} 2"), GROUP, "2 is not from 4 (pipeline ranks) to 8 (micro-batches of a step)"),
        ("--moe-layer-recompute", "--moe-layer-recompute", "whole blocks of experts are not planned to be recomputed; plans recompute core_attn, layernorm, mla_up_proj, moe_act, mlp"),
        ("--context-parallel-size 2 --cp-comm-type p2p a2a p2p a2a", "--cp-comm-type", "kinds that differ from layer to layer are not planned; give one for all layers"),
        ("--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 3", "--decoder-last-pipeline-num-layers", "the rest of the layers does not divide evenly"),
        ("--pipeline-model-parallel-size 4 --account-for-loss-in-pipeline-split", "--account-for-loss-in-pipeline-split", "the layers do not divide evenly"),
        ("--num-distributed-optimizer-instances 3", "--num-distributed-optimizer-instances", "3 does not divide the 64 data-parallel ranks"),
        ("--enable-mhc-connections", "--enable-mhc-connections", "is not modelled"),
    ] {
        let text = script("", LLAMA_70B, &format!("{LLAMA3} {options}"));
        let error = read(&text).expect_err(options).to_string();
        assert_eq!(error, format!("run.sh:2: `{key}`: {message}"), "{options}");
    }
}

#[test]
fn embedding_and_loss_count_as_layers_of_virtual_stages() {
    let options = "--vocab-size 128256 --use-rope-scaling --pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 1 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split";
    let (_, read, _) = read(&script("", LLAMA_405B, options)).expect("imports");
    let stages = &read.decisions.stages.0;
    assert_eq!((read.decisions.vpp, stages.len()), (8, 128));
    assert_eq!((stages[0], stages[1], stages[127]), (0, 1, 0));
}

#[test]
fn modules_are_read_beside_the_short_option_of_recomputation() {
    let recompute = |options: &str| {
        let (_, read, _) = read(&script("", LLAMA_70B, options)).expect("imports");
        read.decisions.recompute
    };
    let modules = recompute("--recompute-activations --recompute-modules mlp");
    assert!(matches!(modules, plans::Recompute::Modules(_)));
    let both = recompute("--recompute-granularity full --recompute-activations");
    assert_eq!(both, plans::Recompute::Selective);
}

/// If a variable names the program, the options behind it are read; if they only name a file of
/// settings, the error says so.
#[test]
fn programs_that_a_variable_names_are_found() {
    let options = "--tensor-model-parallel-size 2 --micro-batch-size 1 --seq-length 4096";
    for (launch, size) in [
        (
            format!("torchrun --nproc_per_node 8 $SCRIPT {options}"),
            Some(2),
        ),
        (
            format!("torchrun --nproc_per_node 8 --rdzv_id $JOB \"${{SCRIPT}}\" {options}"),
            Some(2),
        ),
        (
            format!("exec python -m torch.distributed.run --nproc_per_node=8 $SCRIPT {options}"),
            Some(2),
        ),
        // Here the variable is no program: it is the value of an option, or follows a command that
        // starts none.
        (format!("torchrun --nproc_per_node $GPUS {options}"), None),
        (format!("rsync $SCRIPT {options}"), None),
    ] {
        let read = Document::read(&launch, "a.sh", None, &|_| None);
        let read = read
            .ok()
            .and_then(|read| read.size("--tensor-model-parallel-size").ok());
        assert_eq!(read.flatten(), size, "{launch}");
    }
    let launch =
        "HERE=\"$(pwd)\"\n: \"${SCRIPT:?set SCRIPT to train.py}\"\ntorchrun --nproc-per-node 8";
    for (rest, said) in [
        (
            "\"$SCRIPT\" \"$HERE/training_args.json\" \"$@\"",
            "the settings of `$SCRIPT` are in `training_args.json`",
        ),
        (
            "\"$SCRIPT\" --deepspeed \"$HERE/ds_config.json\" \"$@\"",
            "the settings of `$SCRIPT` are in `ds_config.json`",
        ),
        (
            "-m axolotl.cli.train \"$HERE/axolotl.yaml\" \"$@\"",
            "the settings of `axolotl.cli.train` are in `axolotl.yaml`",
        ),
        (
            "\"$SCRIPT\" \"$@\"",
            "`$SCRIPT` is given no `--option`: its settings are not in this script",
        ),
    ] {
        let text = format!("{launch} {rest}\n");
        let refused = Document::read(&text, "a.sh", None, &|_| None)
            .expect_err(rest)
            .to_string();
        assert!(refused.starts_with(&format!("a.sh:3: {said}")), "{refused}");
    }
}
