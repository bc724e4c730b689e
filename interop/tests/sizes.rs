//! Sizes that no job has, and files that state none.

use interop::check::check;
use interop::import::{Document, Given, import};

fn findings(name: &str, text: &str) -> Vec<String> {
    let document = Document::read(text, name, None, &|_| None).expect("well-formed");
    let found = check(&document, None).expect("schema");
    found.iter().map(ToString::to_string).collect()
}

/// Degrees and micro-batches of 0 or less are found where the system refuses them; where it reads 0 as not set, they are taken.
#[test]
fn sizes_are_at_least_1() {
    let titan = |degree: i32| format!("[parallelism]\ntensor_parallel_degree = {degree}\n");
    let megatron = |option: &str| format!("torchrun pretrain_gpt.py --num-layers 4 {option} 0\n");
    let deepspeed = |key: &str| format!("{{\"train_batch_size\": 8,\n{key}}}");
    let expected = "a whole number of at least 1";
    for (name, text, wrong) in [
        ("a.toml", titan(0), true),
        ("a.toml", titan(-2), true),
        ("a.toml", titan(1), false),
        ("a.sh", megatron("--tensor-model-parallel-size"), true),
        ("a.sh", megatron("--micro-batch-size"), true),
        (
            "a.json",
            deepspeed("\"gradient_accumulation_steps\": 0"),
            true,
        ),
        (
            "a.json",
            deepspeed("\"tensor_parallel\": {\"autotp_size\": 0}"),
            false,
        ),
        (
            "a.yaml",
            "base_model: x\ntensor_parallel_size: 0\n".to_owned(),
            false,
        ),
    ] {
        let found = findings(name, &text);
        let said = found.iter().any(|line| line.contains(expected));
        assert_eq!(said, wrong, "{text}: {found:?}");
    }
}

/// What is no size is not read as 1, and a file that configures nothing is not read as the defaults.
#[test]
fn imports_of_no_size_are_refused() {
    let model = catalog::load::model("llama3-8b").expect("preset");
    let given = Given {
        model: &model,
        gpus: Some(8),
        seq_len: None,
        gpus_per_node: 8,
    };
    for (name, text, says) in [
        (
            "a.toml",
            "[parallelism]\ntensor_parallel_degree = 0\n",
            "a.toml:2: `parallelism.tensor_parallel_degree`: 0 is not a whole number of at least 1",
        ),
        (
            "a.toml",
            "[parallelism]\ntensor_parallel_degree = 10\n",
            "a.toml: 8 ranks are no multiple of 10, the product of parallel degrees",
        ),
        (
            "a.sh",
            "--micro-batch-size 0 --seq-length 4096",
            "a.sh:1: `--micro-batch-size`: 0 is not a whole number of at least 1",
        ),
        (
            "a.py",
            "import megatron.bridge\nwhile True: pass\n",
            "a.py: a configuration is not given; the file sets no key of this system",
        ),
    ] {
        let document = Document::read(text, name, None, &|_| None).expect("well-formed");
        let wrong = import(&document, &given).expect_err(text).to_string();
        assert!(wrong.starts_with(says), "{wrong}");
    }
}

/// An option that another option follows has no value; the message does not say `true`, which nobody wrote.
#[test]
fn an_option_without_its_value_is_said_to_have_none() {
    let text = "torchrun pretrain_gpt.py --num-layers 4 --seq-length --micro-batch-size 1\n";
    let document = Document::read(text, "run.sh", None, &|_| None).expect("shell");
    let said = document.size("--seq-length").expect_err("no value");
    let wanted = "run.sh:1: `--seq-length`: no value is given; expected a whole number";
    assert!(said.to_string().starts_with(wanted), "{said}");
    let findings = check(&document, None).expect("schemas");
    let said = findings.iter().find(|found| found.key == "--seq-length");
    let said = said.map(|found| found.message.as_str());
    assert_eq!(said, Some("no value where a whole number is expected"));
}

/// A number of GPUs beside that of the file is taken where the rest is data parallelism, with a note; else the two contradict
/// each other.
#[test]
fn a_number_of_gpus_beside_the_files_is_told_or_refused() {
    let model = catalog::load::model("llama3-8b").expect("preset");
    let read = |name: &str, text: &str, gpus: u64| {
        let document = Document::read(text, name, None, &|_| None).expect("well-formed");
        let given = Given {
            model: &model,
            gpus: Some(gpus),
            seq_len: Some(4096),
            gpus_per_node: 8,
        };
        import(&document, &given)
    };
    let titan = "[parallelism]\ndata_parallel_shard_degree = 4\ntensor_parallel_degree = 2\n";
    let nanotron = "parallelism: {dp: 4, tp: 2, pp: 1}\ntokens: {micro_batch_size: 1, batch_accumulation_per_replica: 1, sequence_length: 4096}\n\
                    model: {model_config: {is_llama_config: true, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, \
                    num_attention_heads: 32, num_key_value_heads: 8, vocab_size: 128256, rope_theta: 500000.0, max_position_embeddings: 8192}}\n";
    let accelerate = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n";
    let torchrun = "torchrun --nproc_per_node 8 pretrain_gpt.py --seq-length 4096 --micro-batch-size 1 --global-batch-size 16 --bf16\n";
    let rest = "[parallelism]\ntensor_parallel_degree = 2\n";
    let told = "the file starts 8 GPUs; the job is planned on the 16 that were asked for";
    let refused = "the file's degrees make a job of 8 GPUs, not of 16";
    for (name, text, wanted) in [
        ("a.toml", titan, Err(refused)),
        ("a.yaml", nanotron, Err(refused)),
        ("a.yaml", accelerate, Ok(Some(told))),
        ("a.sh", torchrun, Ok(Some(told))),
        ("a.toml", rest, Ok(None)),
    ] {
        match (read(name, text, 16), wanted) {
            (Ok(read), Ok(told)) => {
                assert_eq!(read.workload.gpus, 16, "{text}");
                let found = read.notes.iter().find(|note| note.contains("asked for"));
                assert_eq!(found.is_some(), told.is_some(), "{text}: {:?}", read.notes);
                assert!(told.is_none_or(|told| found.is_some_and(|note| note.contains(told))));
            }
            (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
            (read, _) => panic!("{text}: {read:?}"),
        }
        // The file's own number has no note.
        let read = read(name, text, 8).expect(text);
        assert!(
            !read.notes.iter().any(|note| note.contains("asked for")),
            "{text}"
        );
    }
}
