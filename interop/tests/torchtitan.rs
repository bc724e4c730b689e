//! Python configurations of torchtitan, as its own recipes write them.

use catalog::{CudaGraphs, Fp8Recipe, Precision};
use interop::import::{Document, Given, ImportError, Imported, import};

/// The function `mine` of a file with this text, imported on eight GPUs, and the runtime that predicts it.
fn read(text: &str, model: &str) -> Result<(Imported, &'static str), ImportError> {
    let text = format!("from torchtitan.trainer import Trainer\n\n\n{text}");
    let text = interop::config::python::only_function(&text, "mine").expect("defined");
    let document = Document::read(&text, "a.py", None, &|_| None)?;
    let model = catalog::load::model(model).expect("preset");
    let given = Given {
        model: &model,
        gpus: Some(8),
        seq_len: None,
        gpus_per_node: 8,
    };
    let imported = import(&document, &given)?;
    let runtime = imported.runtime(&document);
    Ok((imported, runtime))
}

/// A function that changes a configuration of Llama 3 8B by these lines.
fn llama(lines: &str) -> (Imported, &'static str) {
    let text = format!(
        "def base() -> Trainer.Config:\n    return Trainer.Config(model_spec=model_registry(\"8B\"), training=TrainingConfig(local_batch_size=1, seq_len=2048))\n\n\ndef mine():\n    config = base()\n{lines}    return config\n"
    );
    read(&text, "llama3-8b").expect(lines)
}

#[test]
fn converters_decide_the_precision() {
    for (converter, precision, recipe, note) in [
        (
            "Float8LinearConverter.Config()",
            Precision::Fp8,
            Some(Fp8Recipe::Rowwise),
            None,
        ),
        (
            "MXFP8LinearConverter.Config()",
            Precision::Fp8,
            Some(Fp8Recipe::Mxfp8),
            None,
        ),
        (
            "NVFP4LinearConverter.Config(fqns=[\"layers\"])",
            Precision::Bf16,
            None,
            Some(
                "a.py:10: NVFP4LinearConverter.Config: not planned for; the prediction shows more time, with products in 16 bits",
            ),
        ),
        (
            "LMHeadCastConverter.Config()",
            Precision::Bf16,
            None,
            Some(
                "a.py:10: LMHeadCastConverter.Config: not planned for; the prediction is for the model without it",
            ),
        ),
    ] {
        let argument =
            format!("    config.model_spec = model_registry(\"8B\", converters=[{converter}])\n");
        let variable = format!(
            "    converters = [{converter}]\n    config.model_spec = model_registry(\"8B\", converters=converters)\n"
        );
        for lines in [argument, variable] {
            let (read, _) = llama(&lines);
            let found = (read.workload.precision, read.decisions.fp8_recipe);
            assert_eq!(found, (precision, recipe), "{lines}");
            assert_eq!(read.notes, Vec::from_iter(note), "{lines}");
        }
    }
    let toml = "[model]\nconverters = [\"quantize.linear.mx\"]\n";
    let document = Document::read(toml, "a.toml", None, &|_| None).expect("TOML");
    let model = catalog::load::model("llama3-8b").expect("preset");
    let given = Given {
        model: &model,
        gpus: Some(8),
        seq_len: None,
        gpus_per_node: 8,
    };
    let read = import(&document, &given).expect("imports");
    assert_eq!(read.decisions.fp8_recipe, Some(Fp8Recipe::Mxfp8));
}

#[test]
fn adapters_are_refused() {
    let text = "def mine():\n    return Trainer.Config(model_spec=model_registry(\"8B\", converters=[LoRAConverter.Config(rank=8)]))\n";
    let refused = read(text, "llama3-8b").expect_err("adapters").to_string();
    assert!(
        refused.contains("a.py:5: `LoRAConverter.Config`"),
        "{refused}"
    );
}

#[test]
fn weights_in_16_bits_are_noted() {
    let (read, _) = llama("    config.training.dtype = \"bfloat16\"\n");
    assert!(read.notes[0].starts_with(
        "a.py:10: training.dtype bfloat16: no plan can express weights and states in 16"
    ));
    let (read, _) = llama("    config.training.dtype = \"float32\"\n");
    assert_eq!(read.notes, Vec::<String>::new());
}

#[test]
fn the_runtime_compiles_if_the_model_is_compiled() {
    for (components, runtime) in [
        ("", "torchtitan-compile-2026"),
        (", components=[\"model\"]", "torchtitan-compile-2026"),
        (", components=[\"loss\"]", "torchtitan-2026"),
    ] {
        let lines = format!("    config.compile = CompileConfig(enable=True{components})\n");
        assert_eq!(llama(&lines).1, runtime, "{components}");
    }
}

#[test]
fn experts_are_captured_where_they_have_a_fixed_room() {
    for (arguments, graphs) in [
        ("", CudaGraphs::None),
        (", moe_comm_backend=\"hybridep\"", CudaGraphs::None),
        (
            ", moe_comm_backend=\"deepep\", non_blocking_capacity_factor=1.0",
            CudaGraphs::None,
        ),
        (
            ", moe_comm_backend=\"hybridep\", non_blocking_capacity_factor=1.0",
            CudaGraphs::Step,
        ),
        (
            ", moe_comm_backend=\"hybridep\", non_blocking_capacity_factor=None",
            CudaGraphs::None,
        ),
    ] {
        let text = format!(
            "def mine():\n    return Trainer.Config(model_spec=model_registry(\"16B\"{arguments}), parallelism=ParallelismConfig(expert_parallel_degree=8))\n"
        );
        let (read, _) = read(&text, "deepseek-v2-lite").expect(arguments);
        assert_eq!(read.decisions.graphs, Some(graphs), "{arguments}");
    }
}

#[test]
fn a_base_that_is_not_in_the_file_is_refused() {
    let sets = "    config.parallelism = ParallelismConfig(tensor_parallel_degree=2)\n    config.activation_checkpoint = None\n    config.compile = CompileConfig()\n";
    let imported = |base: &str, lines: &str| {
        read(
            &format!("def mine():\n    config = {base}\n{lines}    return config\n"),
            "llama3-8b",
        )
    };
    for base in [
        "llama3_8b()",
        "to_graph_trainer_config(llama3_8b(), registry)",
        "Controller.Config(batch=4)",
    ] {
        let refused = imported(base, sets).expect_err(base).to_string();
        let open = "what the base decides: training.local_batch_size, training.seq_len";
        assert!(refused.contains(open), "{refused}");
    }
    // All that the base would decide is set after it.
    let all = format!(
        "{sets}    config.training.local_batch_size = 1\n    config.training.seq_len = 4096\n"
    );
    let (read, _) = imported("llama3_8b()", &all).expect("imports");
    assert_eq!((read.decisions.tp, read.workload.seq_len), (2, 4096));
    // The configuration may be a variable.
    let made = "Trainer.Config(training=TrainingConfig(local_batch_size=4, seq_len=1024))";
    let (read, _) = imported(made, "").expect("imports");
    assert_eq!(
        (read.decisions.micro_batch, read.workload.seq_len),
        (4, 1024)
    );
}

/// A function may stand before the one whose configuration it changes.
#[test]
fn changes_count_after_what_they_change() {
    let text = "def mine():\n    config = _base()\n    config.training.seq_len = 4096\n    return config\n\n\ndef _base():\n    config = _first()\n    config.training.seq_len = 2048\n    config.training.local_batch_size = 2\n    return config\n\n\ndef _first():\n    return Trainer.Config(training=TrainingConfig(local_batch_size=1, seq_len=SEQ))\n\n\nSEQ = 1024\n";
    let (read, _) = read(text, "llama3-8b").expect("imports");
    assert_eq!(
        (read.decisions.micro_batch, read.workload.seq_len),
        (2, 4096)
    );
}

/// An optimizer that updates each weight within backward frees its gradient there, which no plan does.
#[test]
fn an_optimizer_within_backward_is_told() {
    let model = catalog::load::model("llama3-8b").expect("preset");
    let given = Given {
        model: &model,
        gpus: Some(8),
        seq_len: None,
        gpus_per_node: 8,
    };
    for (value, told) in [("true", 1), ("false", 0)] {
        let text = format!("[optimizer]\nearly_step_in_backward = {value}\n");
        let document = Document::read(&text, "a.toml", None, &|_| None).expect("well-formed");
        let notes = import(&document, &given).expect("imports").notes;
        let said = "a.toml:2: optimizer.early_step_in_backward = true: not planned for; the prediction shows more memory";
        let found = notes.iter().filter(|note| note.starts_with(said)).count();
        assert_eq!(found, told, "{value}: {notes:?}");
    }
}
