//! Files of axolotl: how they divide ranks, and what their defaults and plugins switch on.

use catalog::Zero;
use interop::import::{Document, Given, ImportError, Imported, import};

/// A file of axolotl with these lines, for a model.
fn of(model: &str, lines: &str, gpus: Option<u64>) -> Result<(Document, Imported), ImportError> {
    let text = format!("base_model: a/model\nsequence_len: 2048\nbf16: true\n{lines}\n");
    let document = Document::read(&text, "a.yaml", None, &|_| None)?;
    let model = catalog::load::model(model).expect("preset");
    let given = Given {
        model: &model,
        gpus,
        seq_len: None,
        gpus_per_node: 8,
    };
    let imported = import(&document, &given)?;
    Ok((document, imported))
}

fn read(lines: &str) -> (Document, Imported) {
    of("llama3-8b", lines, Some(8)).expect(lines)
}

/// Ranks that share states and replicas of these, as `_get_parallel_config_kwargs` in axolotl's utils/distributed.py makes them.
#[test]
fn ranks_divide_as_axolotl_divides_them() {
    const FSDP: &str = "fsdp_config: {fsdp_version: 2, reshard_after_forward: true}\n";
    for (lines, gpus, wanted) in [
        ("", Some(8), Ok((8, 1))),
        // 8 GPUs of 2 shards make 4 replicas.
        ("dp_shard_size: 2", Some(8), Ok((2, 4))),
        ("dp_shard_size: 8", Some(8), Ok((8, 1))),
        ("dp_shard_size: 1", Some(8), Ok((8, 1))),
        ("dp_replicate_size: 2", Some(8), Ok((4, 2))),
        (
            "dp_shard_size: 2\ndp_replicate_size: 4",
            Some(8),
            Ok((2, 4)),
        ),
        (
            "dp_shard_size: 2\ntensor_parallel_size: 2",
            Some(8),
            Ok((2, 2)),
        ),
        // 2 · 4 · 2 GPUs.
        (
            "dp_shard_size: 2\ndp_replicate_size: 4\ntensor_parallel_size: 2",
            None,
            Ok((2, 4)),
        ),
        (
            "dp_shard_size: 2",
            None,
            Err("the number of GPUs is not given"),
        ),
        (
            "dp_shard_size: 2\ndp_replicate_size: 2",
            Some(8),
            Err("2 shards in each of 2 replicas are 4 ranks, and 8 GPUs over tp=1 and cp=1 are 8"),
        ),
        (
            "dp_shard_size: 3",
            Some(8),
            Err("3 shards in each of 1 replicas are 3 ranks"),
        ),
    ] {
        match (of("llama3-8b", &format!("{FSDP}{lines}"), gpus), wanted) {
            (Ok((_, read)), Ok(ranks)) => {
                let d = &read.decisions;
                assert_eq!((d.dp_shard, d.dp_replicate), ranks, "{lines}");
                assert_eq!(d.zero, Zero::Z3, "{lines}");
            }
            (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
            (read, _) => panic!("{lines}: {read:?}"),
        }
    }
    let refused = of("llama3-8b", "dp_shard_size: 2", Some(8)).expect_err("no FSDP");
    assert!(
        refused.to_string().contains("without fsdp_config"),
        "{refused}"
    );
}

/// Expert parallelism is an axis of its own: all axes multiplied are the GPUs.
#[test]
fn expert_parallelism_takes_what_the_other_axes_leave() {
    const FSDP: &str = "fsdp_config: {fsdp_version: 2}\n";
    for (lines, wanted) in [
        ("expert_parallel_size: 8", Ok((1, 8))),
        (
            "fsdp_config: {fsdp_version: 2}\nexpert_parallel_size: 8",
            Ok((8, 1)),
        ),
        (
            "fsdp_config: {fsdp_version: 2}\nexpert_parallel_size: 4\ndp_shard_size: 2",
            Ok((8, 1)),
        ),
        ("expert_parallel_size: 4", Err("is 4, not the 8 GPUs")),
        (
            "fsdp_config: {fsdp_version: 2}\nexpert_parallel_size: 4\ndp_shard_size: 4",
            Err("is 16, not the 8 GPUs"),
        ),
    ] {
        match (of("mixtral-8x7b", lines, Some(8)), wanted) {
            (Ok((_, read)), Ok(ranks)) => {
                let d = &read.decisions;
                assert_eq!((d.dp_shard, d.dp_replicate), ranks, "{lines}");
            }
            (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
            (read, _) => panic!("{lines}: {read:?}"),
        }
    }
    let lines = format!("{FSDP}expert_parallel_size: 4\ndp_shard_size: 2");
    let (_, read) = of("mixtral-8x7b", &lines, Some(8)).expect("imports");
    let told = "planned as sharded over all 8 data-parallel ranks; axolotl shards them over the 2";
    assert!(
        read.notes.iter().any(|note| note.contains(told)),
        "{:?}",
        read.notes
    );
}

/// Naming the plugin of Cut Cross Entropy switches it on.
#[test]
fn cut_cross_entropy_is_on_if_its_plugin_is_named() {
    let plugin = "plugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n";
    for (lines, noted) in [
        ("", false),
        ("cut_cross_entropy: true", true),
        (plugin, true),
        (&format!("{plugin}cut_cross_entropy: true"), true),
        (&format!("{plugin}cut_cross_entropy: false"), false),
        ("plugins: [axolotl.integrations.liger.LigerPlugin]", false),
    ] {
        let (_, read) = read(lines);
        let said = "cut_cross_entropy: not planned for; the prediction shows more memory";
        let found = read.notes.iter().any(|note| note.contains(said));
        assert_eq!(found, noted, "{lines}: {:?}", read.notes);
    }
}

/// Checkpoints are re-entrant unless the file says otherwise, and then run whole layers again.
#[test]
fn checkpoints_are_reentrant_by_default() {
    let runtime = catalog::load::runtime("hf-trainer").expect("preset");
    let on = "gradient_checkpointing: true";
    for (lines, noted) in [
        ("", false),
        (on, true),
        (
            &format!("{on}\ngradient_checkpointing_kwargs: {{use_reentrant: true}}"),
            true,
        ),
        (
            &format!("{on}\ngradient_checkpointing_kwargs: {{use_reentrant: false}}"),
            false,
        ),
        (&format!("{on}\nactivation_offloading: true"), false),
        (
            &format!("{on}\nactivation_offloading: hidden_states"),
            false,
        ),
        (&format!("{on}\nselective_checkpointing: true"), false),
        ("fsdp_config: {activation_checkpointing: true}", false),
    ] {
        let (_, read) = read(lines);
        let notes = read.notes_under(&runtime);
        let said = "checkpoints run whole layers again unless gradient_checkpointing_kwargs.use_reentrant is false";
        let found = notes.iter().any(|note| note.contains(said));
        assert_eq!(found, noted, "{lines}: {notes:?}");
    }
}

/// The Trainer runs the library's own layers. accelerate copies 16-bit weights to 32 bits under FSDP1; axolotl's own FSDP2 does
/// not.
#[test]
fn the_trainers_layers_are_predicted_and_16_bit_weights_told() {
    let second = "fsdp_config: {fsdp_version: 2}";
    for (lines, runtime, noted) in [
        ("", "hf-trainer", true),
        (second, "hf-trainer", true),
        (
            "fsdp_version: 2\nfsdp_config: {offload_params: false}",
            "hf-trainer",
            true,
        ),
        ("fsdp_config: {fsdp_version: 1}", "hf-trainer", false),
        ("fsdp_config: {offload_params: false}", "hf-trainer", false),
        (
            "deepspeed: {zero_optimization: {stage: 2}}",
            "hf-deepspeed",
            false,
        ),
        (
            &format!("{second}\ncontext_parallel_size: 2"),
            "fsdp2",
            true,
        ),
    ] {
        let (document, read) = read(lines);
        assert_eq!(read.runtime(&document), runtime, "{lines}");
        let said = "bf16 true: no plan can express weights and states in 16 bits alone";
        let found = read.notes.iter().any(|note| note.contains(said));
        assert_eq!(found, noted, "{lines}: {:?}", read.notes);
    }
    let (_, read) = read(second);
    for (runtime, told) in [("hf-trainer", true), ("fsdp2", false)] {
        let notes = read.notes_under(&catalog::load::runtime(runtime).expect("preset"));
        let found = notes
            .iter()
            .any(|note| note.contains("keeps the embedding gathered"));
        assert_eq!(found, told, "{runtime}: {notes:?}");
    }
}

/// Spectrum trains a part of the layers, which no plan does.
#[test]
fn training_of_some_layers_is_refused() {
    for (lines, key) in [
        ("spectrum_top_fraction: 0.5", "spectrum_top_fraction"),
        (
            "plugins: [axolotl.integrations.spectrum.SpectrumPlugin]",
            "plugins",
        ),
    ] {
        let refused = of("llama3-8b", lines, Some(8))
            .expect_err(lines)
            .to_string();
        assert!(
            refused.contains(&format!("`{key}`: only training of all weights")),
            "{refused}"
        );
    }
}
