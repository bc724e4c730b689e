//! Recipes of Megatron Bridge: the functions that they start from, and the plan that they are read
//! as.

use catalog::{Adapters, Overlap, Zero};
use interop::import::{Document, Given, ImportError, Imported, import};

/// A recipe of Megatron Bridge that starts from a function, followed by these lines.
fn recipe(function: &str, lines: &str) -> Result<Imported, ImportError> {
    let lines: String = lines.lines().map(|line| format!("    {line}\n")).collect();
    let text = format!(
        "from megatron.bridge.recipes.other import (\n    llama3_recipe,\n)\n\ndef r(scheme=\"lora\"):\n    cfg = {function}()\n    cfg.model = AutoBridge.from_hf_pretrained(\"meta-llama/Llama-3.1-8B\").to_megatron_provider(load_weights=False)\n{lines}    return cfg\n"
    );
    let model = catalog::load::model("llama3-8b").expect("preset");
    let given = Given {
        model: &model,
        gpus: Some(8),
        seq_len: None,
        gpus_per_node: 8,
    };
    let document = Document::read(&text, "a.py", None, &|_| None)?;
    import(&document, &given)
}

#[test]
fn a_bridge_recipe_starts_from_the_function_that_it_calls() {
    let packs = "takes --lengths";
    for (function, lines, sizes, overlaps, packed) in [
        ("_pretrain_common", "", (2, 32, 4096), true, false),
        ("_sft_common", "", (1, 128, 2048), false, true),
        ("_peft_common", "", (1, 128, 2048), false, true),
        ("_sft_common_vlm", "", (2, 32, 4096), false, true),
        ("_peft_common_vlm", "", (2, 32, 4096), false, true),
        (
            "_sft_common",
            "cfg.model.seq_length = 1024",
            (1, 128, 1024),
            false,
            true,
        ),
        (
            "_sft_common",
            "seq = 512\ncfg.dataset.seq_length = seq",
            (1, 128, 512),
            false,
            true,
        ),
        (
            "_sft_common",
            "cfg.dataset = default_squad_config(seq_length=4096, enable_offline_packing=False)\ncfg.ddp.overlap_grad_reduce = True\ncfg.ddp.overlap_param_gather = True\ncfg.train.global_batch_size = 16",
            (1, 16, 4096),
            true,
            false,
        ),
    ] {
        let read = recipe(function, lines).expect(function);
        let (d, w) = (&read.decisions, read.workload);
        assert_eq!(
            (d.micro_batch, w.global_batch, w.seq_len),
            sizes,
            "{function} {lines}"
        );
        let found = d.overlap.grad_reduce && d.overlap.param_gather;
        assert_eq!(found, overlaps, "{function} {lines}");
        assert_eq!(d.zero, Zero::Z1, "{function}");
        let notes = read.notes.iter().filter(|note| note.contains(packs));
        assert_eq!(notes.count() == 1, packed, "{function} {lines}");
    }
    let error =
        recipe("llama3_recipe", "cfg.train.micro_batch_size = 1").expect_err("another file's");
    assert_eq!(
        error.to_string(),
        "a.py:6: `llama3_recipe`: its settings are in another file; import that file's recipe, or write a recipe that starts from one of _pretrain_common, _sft_common, _peft_common, _sft_common_vlm, _peft_common_vlm"
    );
}

#[test]
fn adapters_of_a_bridge_recipe_are_read_or_refused() {
    let usual = "rank=32,alpha=32,modules=q+k+v+proj+fc1+fc2";
    let narrow = "rank=8,alpha=16,modules=q+k+v+proj,dropout=0.1";
    for (function, lines, adapters) in [
        ("_peft_common", "", Some(usual)),
        (
            "_peft_common",
            "cfg.peft = default_peft_config(scheme)",
            Some(usual),
        ),
        ("_peft_common", "cfg.peft = scheme", Some(usual)),
        ("_peft_common", "cfg.peft = None", None),
        (
            "_peft_common",
            "cfg.peft = default_peft_config(\"none\")",
            None,
        ),
        ("_pretrain_common", "", None),
        (
            "_sft_common",
            "cfg.peft = LoRA(dim=8, alpha=16, dropout=0.1, target_modules=[\"linear_qkv\", \"linear_proj\"])",
            Some(narrow),
        ),
        (
            "_peft_common",
            "names = [\"linear_qkv\", \"linear_proj\"]\ncfg.peft = default_peft_config(scheme, target_modules=names, dim=8, alpha=16, dropout=0.1)",
            Some(narrow),
        ),
        (
            "_peft_common",
            "cfg.peft.dim = 8\ncfg.peft.alpha = 16\ncfg.peft.dropout = 0.1\ncfg.peft.target_modules = [\"attention\"]",
            Some(narrow),
        ),
        (
            "_peft_common",
            "of = default_peft_config(scheme, dropout=0.1)\nif scheme:\n    of.dim = 8\n    of.alpha = 16\n    of.target_modules = [\"linear_qkv\", \"linear_proj\"]\n    cfg.peft = of\nelse:\n    cfg.peft = scheme",
            Some(narrow),
        ),
    ] {
        let found = recipe(function, lines).expect(lines).adapters;
        let found = found.as_ref().map(Adapters::to_string);
        assert_eq!(found.as_deref(), adapters, "{function} {lines}");
    }
    for (lines, key) in [
        ("cfg.peft = DoRA(dim=8)", "peft"),
        ("cfg.peft = default_peft_config(\"dora\")", "peft"),
        (
            "cfg.peft.target_modules = [\"*.layers.0.*.linear_qkv\"]",
            "peft.target_modules",
        ),
        (
            "cfg.peft.normalize_moe_lora = True",
            "peft.normalize_moe_lora",
        ),
    ] {
        let error = recipe("_peft_common", lines).expect_err(lines).to_string();
        assert!(error.contains(&format!("`{key}`: ")), "{error}");
    }
}

#[test]
fn what_a_bridge_recipe_overlaps_is_read_from_both_places() {
    let divided = "cfg.model.tensor_model_parallel_size = 2\ncfg.model.sequence_parallel = True";
    let overlap = |grad_reduce, param_gather, tensor_parallel| Overlap {
        grad_reduce,
        param_gather,
        tensor_parallel,
        pipeline: true,
        expert_parallel: false,
    };
    for (function, lines, expected) in [
        (
            "_pretrain_common",
            format!("{divided}\ncfg.model.tp_comm_overlap = True"),
            overlap(true, true, true),
        ),
        (
            "_pretrain_common",
            format!("{divided}\ncfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)"),
            overlap(true, true, true),
        ),
        (
            "_pretrain_common",
            format!(
                "{divided}\nof = CommOverlapConfig(tp_comm_overlap=True, overlap_grad_reduce=False)\ncfg.comm_overlap = of"
            ),
            overlap(false, true, true),
        ),
        (
            "_pretrain_common",
            "cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)".to_owned(),
            overlap(true, true, false),
        ),
        (
            "_pretrain_common",
            format!(
                "{divided}\ncfg.model.tp_comm_overlap = True\ncfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False, overlap_param_gather=False)"
            ),
            overlap(true, false, false),
        ),
        (
            "_sft_common",
            "cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)".to_owned(),
            overlap(true, true, false),
        ),
        (
            "_sft_common",
            "cfg.comm_overlap = None".to_owned(),
            overlap(false, false, false),
        ),
    ] {
        let found = recipe(function, &lines).expect(&lines).decisions.overlap;
        assert_eq!(found, expected, "{function} {lines}");
    }
}

/// Switches off the checks for NaN and Inf that every recipe makes and no prediction counts.
const UNCHECKED: &str =
    "cfg.rerun_state_machine.check_for_nan_in_loss = False\ncfg.ddp.check_for_nan_in_grad = False";

#[test]
fn checks_for_nan_that_a_bridge_recipe_leaves_on_are_noted() {
    let loss = "rerun_state_machine.check_for_nan_in_loss = False";
    let gradients = "ddp.check_for_nan_in_grad = False";
    let fsdp = "cfg.ddp.use_megatron_fsdp = True";
    for (lines, off, of_gradients) in [
        (UNCHECKED, None, false),
        ("", Some(format!("{loss} and {gradients}")), true),
        (
            "cfg.ddp.check_for_nan_in_grad = False",
            Some(loss.to_owned()),
            false,
        ),
        (
            "check = False\ncfg.rerun_state_machine.check_for_nan_in_loss = check\ncfg.ddp.check_for_nan_in_grad = True",
            Some(gradients.to_owned()),
            true,
        ),
        (fsdp, Some(loss.to_owned()), false),
    ] {
        let read = recipe("_pretrain_common", lines).expect(lines);
        let note = read.notes.iter().find(|note| note.contains("NaN"));
        let found = note.and_then(|note| {
            let assumed = note.strip_prefix("a.py: the plan assumes ")?;
            Some(assumed.split_once(", which")?.0.to_owned())
        });
        assert_eq!(found, off, "{lines}");
        let reads = note.is_some_and(|note| note.contains("all gradients"));
        assert_eq!(reads, of_gradients, "{lines}");
    }
}

#[test]
fn what_no_plan_expresses_of_a_bridge_recipe_is_noted() {
    for (line, note) in [
        (
            "model.attention_backend = \"unfused\"",
            "model.attention_backend = unfused is planned as fused attention",
        ),
        ("model.attention_backend = AttnBackend.auto", ""),
        (
            "model.attention_backend = AttnBackend.local",
            "model.attention_backend = AttnBackend.local is planned as fused attention",
        ),
        (
            "model.fine_grained_activation_offloading = True",
            "model.fine_grained_activation_offloading = True is planned as activations that stay on the device",
        ),
        ("model.fine_grained_activation_offloading = False", ""),
        (
            "model.fp32_residual_connection = True",
            "model.fp32_residual_connection = True is planned as 16 bits between layers",
        ),
        (
            "model.cross_entropy_loss_fusion = True",
            "model.cross_entropy_loss_fusion = True is planned as a loss of several kernels",
        ),
        (
            "model.apply_rope_fusion = False",
            "model.apply_rope_fusion = False is planned as the fused kernel of rotation",
        ),
        (
            "model.bias_activation_fusion = False",
            "model.bias_activation_fusion = False is planned as the fused kernel of SwiGLU",
        ),
        (
            "model.gradient_accumulation_fusion = False",
            "model.gradient_accumulation_fusion = False is planned as gradients that matrix products add up themselves",
        ),
        (
            "optimizer.optimizer = \"muon\"",
            "optimizer.optimizer = muon is planned as Adam",
        ),
        ("optimizer.optimizer = \"adam\"", ""),
        (
            "ddp.bucket_size = 1000",
            "ddp.bucket_size = 1000 is planned as 40000000 elements",
        ),
        (
            "ddp.nccl_ub = True",
            "ddp.nccl_ub = True is planned as messages from buffers that are not registered with NCCL",
        ),
        (
            "comm_overlap = CommOverlapConfig(tp_comm_overlap=False, delay_wgrad_compute=True)",
            "comm_overlap.delay_wgrad_compute = True is planned as gradients of weights made right after those of inputs",
        ),
    ] {
        let lines = format!("cfg.{line}\n{UNCHECKED}");
        let read = recipe("_pretrain_common", &lines).expect(line);
        let expected: Vec<String> = [note]
            .iter()
            .filter(|note| !note.is_empty())
            .map(|note| format!("a.py:8: {note}"))
            .collect();
        let megatron = catalog::load::runtime("megatron-core").expect("preset");
        assert_eq!(read.notes_under(&megatron), expected, "{line}");
    }
    for recipe_of in [
        "\"bf16_with_nvfp4_mixed\"",
        "bf16_with_nvfp4_mixed()",
        "MixedPrecisionConfig(bf16=True, fp4=\"e2m1\")",
    ] {
        let error = recipe(
            "_pretrain_common",
            &format!("cfg.mixed_precision = {recipe_of}"),
        )
        .expect_err("4 bits");
        assert_eq!(
            error.to_string(),
            "a.py:8: `mixed_precision`: fp4 training is not planned"
        );
    }
}

/// Bridge shards gradients and states if one of its two fields is on.
#[test]
fn a_distributed_optimizer_is_on_where_one_of_two_fields_says_so() {
    let (gradients, states) = (
        "cfg.ddp.use_distributed_optimizer = False",
        "cfg.optimizer.use_distributed_optimizer = False",
    );
    for (function, lines, zero) in [
        ("_peft_common", gradients.to_owned(), Zero::Z1),
        ("_peft_common", states.to_owned(), Zero::Z0),
        ("_pretrain_common", states.to_owned(), Zero::Z1),
        (
            "_pretrain_common",
            format!("{gradients}\n{states}"),
            Zero::Z0,
        ),
    ] {
        let read = recipe(function, &lines).expect(function);
        assert_eq!(read.decisions.zero, zero, "{function} {lines}");
    }
    let gathers = "cfg.optimizer.overlap_param_gather = True";
    let overlap = recipe("_sft_common", gathers)
        .expect("imports")
        .decisions
        .overlap;
    assert!(overlap.param_gather && !overlap.grad_reduce);
}

/// Python reads 0 as false and every other number as true, which a warning says.
#[test]
fn numbers_that_stand_for_switches_are_named() {
    for (number, read) in [("0", "false"), ("1", "true"), ("2", "true")] {
        let text = format!(
            "from megatron.bridge.training.config import ConfigContainer\ndef apply(cfg):\n    cfg.model.sequence_parallel = {number}\n"
        );
        let document = Document::read(&text, "a.py", None, &|_| None).expect("well-formed");
        let found = interop::check::check(&document, None).expect("schema");
        let said: Vec<String> = found.iter().map(ToString::to_string).collect();
        let expected = format!("`model.sequence_parallel`: {number} is read as {read}");
        assert!(said.iter().any(|line| line.contains(&expected)), "{said:?}");
    }
}

/// Rules of Megatron-Core and Transformer Engine apply to recipes that set all fields in question.
#[test]
fn rules_of_megatron_core_hold_for_recipes() {
    let window = "cfg.model.window_size = (4095, 0)\ncfg.model.context_parallel_size = 2";
    for (lines, wanted) in [
        (
            format!("{window}\ncfg.model.cp_comm_type = \"p2p\""),
            "a.py:6: `model.window_size`: with model.context_parallel_size above 1 needs model.cp_comm_type a2a or all_gather \
             (context_parallel.py of Transformer Engine)",
        ),
        (format!("{window}\ncfg.model.cp_comm_type = \"a2a\""), ""),
        (window.to_owned(), ""),
        (
            "cfg.model.softmax_type = \"learnable\"\ncfg.model.context_parallel_size = 4\ncfg.model.cp_comm_type = \"all_gather\""
                .to_owned(),
            "a.py:6: `model.softmax_type`: learnable with model.context_parallel_size above 1 needs model.cp_comm_type a2a \
             (context_parallel.py of Transformer Engine)",
        ),
        (
            "cfg.model.recompute_granularity = \"full\"\ncfg.model.recompute_method = None".to_owned(),
            "a.py:6: `model.recompute_granularity`: full needs model.recompute_method (transformer_config.py:1913)",
        ),
        (
            "cfg.model.overlap_moe_expert_parallel_comm = True\ncfg.model.mtp_num_layers = 2".to_owned(),
            "a.py:6: `model.overlap_moe_expert_parallel_comm`: cannot be combined with model.mtp_num_layers above 1 \
             (transformer_config.py:3042)",
        ),
        ("cfg.model.window_size = window\ncfg.model.cp_comm_type = \"p2p\"".to_owned(), ""),
        // A rule of Megatron-LM's command line.
        ("cfg.model.fp32_residual_connection = True\ncfg.model.bf16 = False\ncfg.model.fp16 = False".to_owned(), ""),
    ] {
        let lines = lines.replace('\n', "\n    ");
        let text = format!(
            "from megatron.bridge.recipes.common import _pretrain_common\n\n\ndef r():\n    cfg = _pretrain_common()\n    {lines}\n    return cfg\n"
        );
        let document = Document::read(&text, "a.py", None, &|_| None).expect("well-formed");
        let found = interop::check::check(&document, None).expect("schema");
        let said: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(said.join("\n"), wanted, "{lines}");
    }
}
