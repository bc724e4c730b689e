//! What DeepSpeed's engine holds beside the states that a plan counts: buckets, and states in host memory.

use interop::import::{Document, Given, ImportError, import};

/// The notes on an engine with these keys, beside `zero_optimization` with those.
fn notes(zero: &str, more: &str) -> Result<Vec<String>, ImportError> {
    let text = format!(
        "{{\"train_micro_batch_size_per_gpu\": 1, \"bf16\": {{\"enabled\": true}}, \"zero_optimization\": {{{zero}}}{more}}}"
    );
    let document = Document::read(&text, "a.json", None, &|_| None)?;
    let model = catalog::load::model("llama3-8b").expect("preset");
    let given = Given {
        model: &model,
        gpus: Some(8),
        seq_len: Some(2048),
        gpus_per_node: 8,
    };
    Ok(import(&document, &given)?.notes)
}

/// Buckets of DeepSpeed's own size take more memory than those of 40 million elements that are predicted: in 16 bits
/// (500 - 40)e6 · 2 / 2^30 = 0.857 GiB each.
#[test]
fn buckets_that_are_larger_than_predicted_are_told() {
    let one = "its buffers take 877 MiB more on each GPU";
    let two = "its buffers take 1.71 GiB more on each GPU";
    for (zero, told) in [
        ("\"stage\": 0", None),
        ("\"stage\": 1", Some(one)),
        ("\"stage\": 2", Some(one)),
        ("\"stage\": 2, \"overlap_comm\": true", Some(two)),
        ("\"stage\": 3", Some(one)),
        ("\"stage\": 3, \"reduce_bucket_size\": 5e8", Some(one)),
        ("\"stage\": 3, \"reduce_bucket_size\": 4e7", None),
        // The Trainer writes 4096 · 4096 elements, 17 million.
        ("\"stage\": 3, \"reduce_bucket_size\": \"auto\"", None),
        ("\"stage\": 2, \"contiguous_gradients\": false", None),
    ] {
        let notes = notes(zero, "").expect(zero);
        let found = notes
            .iter()
            .find(|note| note.contains("reduce_bucket_size"));
        assert_eq!(found.is_some(), told.is_some(), "{zero}: {notes:?}");
        let says = told.is_none_or(|told| found.is_some_and(|note| note.contains(told)));
        assert!(says, "{zero}: {notes:?}");
    }
}

/// PyTorch's Adam in host memory is slower than DeepSpeed's.
#[test]
fn pytorchs_adam_on_the_host_is_told() {
    let host = "\"stage\": 2, \"offload_optimizer\": {\"device\": \"cpu\"}";
    let adam = |on: &str| {
        format!(", \"optimizer\": {{\"type\": \"AdamW\", \"params\": {{\"torch_adam\": {on}}}}}")
    };
    for (zero, more, told) in [
        (host, adam("true"), true),
        (host, adam("false"), false),
        (host, String::new(), false),
        ("\"stage\": 2", adam("true"), false),
    ] {
        let notes = notes(zero, &more).expect(zero);
        let found = notes
            .iter()
            .any(|note| note.contains("optimizer.params.torch_adam: not planned for"));
        assert_eq!(found, told, "{zero}{more}: {notes:?}");
    }
}

/// Neither offload could be predicted, and the GPU would be priced with all that it does not hold.
#[test]
fn parameters_on_the_host_with_states_on_nvme_are_refused() {
    let zero = "\"stage\": 3, \"offload_optimizer\": {\"device\": \"nvme\"}, \"offload_param\": {\"device\": \"cpu\"}";
    let refused = notes(zero, "").expect_err("two offloads").to_string();
    assert!(
        refused.contains(
            "`zero_optimization.offload_optimizer`: optimizer states on NVMe are not planned"
        ),
        "{refused}"
    );
}
