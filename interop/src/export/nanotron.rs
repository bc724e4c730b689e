//! nanotron: its YAML.

use catalog::model::{Activation, Family, ModelConfig, NormKind, Position};
use catalog::{AxisOrder, CpKind, Precision, ScheduleKind, Zero};

use super::job::{ExportedFile, Job, heading};
use super::launch::{Program, Starter};
use super::refusal::Limits;
use crate::config::{Node, Value, write};
use plans::decisions::{Decisions, Recompute};
use plans::grammar::{order_name, recompute_name};

const FILE: &str = "nanotron.yaml";

pub(crate) fn program() -> Program {
    Program {
        setup: vec!["export CUDA_DEVICE_MAX_CONNECTIONS=1".to_owned()],
        starter: Starter::Torchrun,
        arguments: format!(
            "\"${{NANOTRON:-.}}/run_train.py\" --config-file \"$HERE/{FILE}\" \"$@\""
        ),
    }
}

pub(crate) fn files(job: &Job<'_>, limits: &mut Limits) -> Vec<ExportedFile> {
    let (d, w) = (job.decisions, job.workload);
    refuse(job, limits);
    let mut root = Node::table();
    root.set("general.project", "vescale-plan");
    root.set("general.run", job.id);
    let axis = |key: &str| format!("parallelism.{key}");
    root.set(&axis("dp"), d.dp());
    root.set(&axis("pp"), d.pp);
    root.set(&axis("tp"), d.tp);
    root.set(&axis("context_parallel_size"), d.cp);
    root.set(&axis("expert_parallel_size"), 1);
    let engine = if d.schedule == ScheduleKind::GPipe {
        "afab"
    } else {
        "1f1b"
    };
    root.set(&axis("pp_engine"), engine);
    let mode = if d.sequence_parallel {
        "REDUCE_SCATTER"
    } else {
        "ALL_REDUCE"
    };
    root.set(&axis("tp_mode"), mode);
    root.set(
        &axis("tp_linear_async_communication"),
        d.overlap.tensor_parallel && d.tp > 1,
    );
    root.set(&axis("recompute_layer"), d.recompute == Recompute::Full);
    let dtype = match w.precision {
        Precision::Fp32 => "float32",
        Precision::Fp16 => "float16",
        Precision::Bf16 | Precision::Fp8 => "bfloat16",
    };
    root.set("model.dtype", dtype);
    root.set(
        "model.init_method.std",
        job.model.constants.initializer_range,
    );
    root.set("model.make_vocab_size_divisible_by", 1);
    model(job.model, d, &mut root);
    root.set("optimizer.zero_stage", u64::from(u8::from(d.zero)));
    optimizer(&mut root);
    root.set("tokenizer.tokenizer_name_or_path", job.model_name);
    root.set("tokens.sequence_length", w.seq_len);
    root.set("tokens.micro_batch_size", d.micro_batch);
    root.set("tokens.batch_accumulation_per_replica", d.num_micro_batches);
    root.set("tokens.train_steps", 100);
    limits.note(true, "the learning rate, train_steps, tokenizer and data stages in nanotron.yaml are yours to set");
    limits.note(
        d.pp > 1,
        "nanotron places layers by their cost, not by the plan's stages",
    );
    vec![ExportedFile {
        name: FILE.to_owned(),
        text: format!("# {}\n{}", heading(job), write::yaml(&root)),
        executable: false,
    }]
}

/// nanotron's file is complete only with an optimizer; these are its example's values.
fn optimizer(root: &mut Node) {
    root.set("optimizer.accumulate_grad_in_fp32", true);
    root.set("optimizer.clip_grad", 1.0);
    root.set("optimizer.weight_decay", 0.01);
    root.set("optimizer.optimizer_factory.name", "adamW");
    root.set("optimizer.optimizer_factory.adam_beta1", 0.9);
    root.set("optimizer.optimizer_factory.adam_beta2", 0.95);
    root.set("optimizer.optimizer_factory.adam_eps", 1e-8);
    root.set("optimizer.optimizer_factory.torch_adam_is_fused", true);
    let rate = "optimizer.learning_rate_scheduler";
    root.set(&format!("{rate}.learning_rate"), 0.0003);
    root.set(&format!("{rate}.lr_warmup_steps"), 2);
    root.set(&format!("{rate}.lr_warmup_style"), "linear");
    root.set(&format!("{rate}.lr_decay_style"), "cosine");
    root.set(&format!("{rate}.min_decay_lr"), 0.00001);
}

fn model(model: &ModelConfig, d: &Decisions, root: &mut Node) {
    let mut set = |key: &str, value: Value| root.set(&format!("model.model_config.{key}"), value);
    // Ring attention and experts are of nanotron's Qwen2, which holds Llama as a case.
    let qwen = d.cp > 1 || model.attention.qkv_bias || model.moe.is_some();
    set(
        if qwen {
            "is_qwen2_config"
        } else {
            "is_llama_config"
        },
        true.into(),
    );
    set("hidden_size", model.hidden.into());
    set("intermediate_size", model.mlp.ffn.into());
    set("num_hidden_layers", model.layers.into());
    set("num_attention_heads", model.attention.heads.into());
    set("num_key_value_heads", model.attention.kv_heads().into());
    set("vocab_size", model.vocab.into());
    set("max_position_embeddings", model.max_position.into());
    set("tie_word_embeddings", model.tied_embeddings.into());
    set("rms_norm_eps", model.constants.norm_epsilon.into());
    set("rope_theta", model.constants.rope_theta.into());
    set("hidden_act", "silu".into());
    set("attention_bias", model.attention.qkv_bias.into());
    if d.cp > 1 {
        set("_attn_implementation", "llama3_ring_attention".into());
    }
    if let Some(moe) = model.moe {
        set("moe_config.num_experts", moe.experts.into());
        set("moe_config.top_k", moe.top_k.into());
        set("moe_config.moe_intermediate_size", moe.expert_ffn.into());
        set(
            "moe_config.enable_shared_expert",
            (moe.shared_ffn > 0).into(),
        );
        if moe.shared_ffn > 0 {
            set(
                "moe_config.shared_expert_intermediate_size",
                moe.shared_ffn.into(),
            );
        }
    }
}

fn refuse(job: &Job<'_>, limits: &mut Limits) {
    let d = job.decisions;
    refuse_model(job.model, limits);
    limits.refuse(
        d.ep > 1 || d.etp > 1,
        format!("ep={}, etp={}", d.ep, d.etp),
        "expert_parallel_size is an axis of its own there, not folded into data parallelism",
        Some(("ep", "1".to_owned())),
    );
    refuse_stages(d, job.model.layers, limits);
    limits.refuse(
        d.cp > 1 && d.cp_kind != CpKind::AllGather,
        format!("cp_kind={}", d.cp_kind.name()),
        "its attention gathers keys and values (llama3_ring_attention)",
        Some(("cp_kind", CpKind::AllGather.name().to_owned())),
    );
    refuse_states(d, limits);
    limits.refuse(
        d.overlap.tensor_parallel && d.tp > 1 && !d.sequence_parallel,
        "overlap=tp with sp=off",
        "tp_linear_async_communication needs tp_mode REDUCE_SCATTER",
        Some(("sp", "on".to_owned())),
    );
    limits.refuse(
        d.pp > 1 && d.dp() > 1 && d.axis_order != AxisOrder::TP_CP_DP_PP,
        format!("order={}", order_name(d.axis_order)),
        "its mesh is pp, dp, cp, tp, outermost first",
        Some(("order", order_name(AxisOrder::TP_CP_DP_PP))),
    );
    let whole = matches!(
        d.recompute,
        Recompute::None | Recompute::Full | Recompute::Layers(0)
    );
    limits.refuse(
        !whole,
        format!("recompute={}", recompute_name(d.recompute)),
        "it recomputes whole layers, all of them",
        Some(("recompute", "full".to_owned())),
    );
    limits.refuse(
        job.workload.precision == Precision::Fp8,
        "precision fp8",
        "its configuration has no fp8 training",
        None,
    );
}

fn refuse_model(m: &ModelConfig, limits: &mut Limits) {
    let llama = matches!(
        m.family,
        Family::Llama | Family::Phi3 | Family::Mixtral | Family::QwenMoe
    ) && m.norm.kind == NormKind::RmsNorm
        && m.mlp.activation == Activation::Silu
        && matches!(m.position, Position::Rope { .. });
    limits.refuse(
        !llama,
        format!("model {}", m.name),
        "it has Llama and Qwen2 models only",
        None,
    );
}

fn refuse_stages(d: &Decisions, layers: u64, limits: &mut Limits) {
    limits.refuse(
        d.pp > 1 && !matches!(d.schedule, ScheduleKind::OneFOneB | ScheduleKind::GPipe),
        format!("schedule={}", d.schedule),
        "it has 1f1b and afab (GPipe) only",
        Some(("schedule", "1f1b".to_owned())),
    );
    limits.refuse(
        !d.stages.is_uniform() && d.stages != plans::StagePartition::even(layers, d.pp),
        "stages",
        "it places layers by their cost",
        Some(("vpp", "1".to_owned())),
    );
}

fn refuse_states(d: &Decisions, limits: &mut Limits) {
    limits.refuse(
        matches!(d.zero, Zero::Z2 | Zero::Z3),
        format!("zero={}", u8::from(d.zero)),
        "it has ZeRO 0 and 1",
        Some(("zero", "1".to_owned())),
    );
    limits.refuse(
        d.zero == Zero::Z1 && d.dp_replicate > 1,
        format!("dp_replicate={}", d.dp_replicate),
        "it shards states over all data-parallel ranks",
        Some(("dp_replicate", "1".to_owned())),
    );
}
