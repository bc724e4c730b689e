//! One plan per target, as people will read it.

use super::*;

fn file(name: &str, text: &str, dialect: Dialect) -> String {
    let (model, workload) = scene(name, 64, Precision::Bf16);
    let strategy = parse(text, &model, &workload).expect("legal");
    let runtime = dialect.runtime();
    let exported = exported_for(runtime, &strategy, &model, &workload, dialect, None);
    exported.expect("expressible").files.remove(0).text
}

#[test]
fn megatron_lm() {
    let text = file(
        "mixtral-8x7b",
        "tp=2,pp=4,vpp=2,ep=8,zero=1,recompute=selective,stages=3/4/4/4/4/4/4/5",
        Dialect::MegatronLm,
    );
    insta::assert_snapshot!(text, @r#"
    # vescale-plan 0123456789abcdef · mixtral-8x7b on 64 GPUs: tp2 pp4 vpp2 ep8 etp1 dp8 zero1 sp mbs1 interleaved recompute=selective stages=3/6x4/5
    GPUS=64
    MEGATRON_ARGS=(
      # Model
      --num-layers 32
      --hidden-size 4096
      --vocab-size 32000
      --padded-vocab-size 32000
      --untie-embeddings-and-output-weights
      --num-attention-heads 32
      --group-query-attention
      --num-query-groups 8
      --kv-channels 128
      --softmax-type vanilla
      --disable-bias-linear
      --hidden-dropout 0
      --attention-dropout 0
      --num-experts 8
      --moe-router-topk 2
      --moe-ffn-hidden-size 14336
      --moe-grouped-gemm
      --init-method-std 0.02
      --normalization RMSNorm
      --norm-epsilon 0.00001
      --rotary-base 1000000
      --rotary-percent 1
      --position-embedding-type rope
      --max-position-embeddings 32768
      --ffn-hidden-size 14336
      --swiglu
      --moe-router-score-function softmax
      --moe-aux-loss-coeff 0
      # Kernels, as the prediction assumed them
      --moe-permute-fusion
      --attention-backend auto
      # Parallelism
      --tensor-model-parallel-size 2
      --pipeline-model-parallel-size 4
      --context-parallel-size 1
      --sequence-parallel
      --expert-model-parallel-size 8
      --expert-tensor-parallel-size 1
      --moe-token-dispatcher-type alltoall
      --pipeline-model-parallel-layout 'Et*3|t*4|t*4|t*4|t*4|t*4|t*4|t*5L'
      # Batch and sequence
      --micro-batch-size 1
      --global-batch-size 256
      --seq-length 4096
      # Precision
      --bf16
      # States
      --accumulate-allreduce-grads-in-fp32
      --use-distributed-optimizer
      # Recomputation
      --recompute-granularity selective
      --recompute-modules core_attn
      # Overlap
      --overlap-grad-reduce
      --overlap-param-gather
      # No checks for NaN and Inf, as the prediction assumed: training does not stop at the first one; losses are still logged
      --no-check-for-nan-in-loss-and-grad
      # Tokenizer and data
      --tokenizer-type HuggingFaceTokenizer
      --tokenizer-model org/tokenizer
      --data-path /data/text
    )
    "#);
}

#[test]
fn megatron_bridge() {
    let text = file(
        "llama3-8b",
        "tp=4,pp=2,vpp=2,zero=1,recompute=layers:2",
        Dialect::MegatronBridge,
    );
    insta::assert_snapshot!(text, @r#"
    """vescale-plan 0123456789abcdef · llama3-8b on 64 GPUs: tp4 pp2 vpp2 dp8 zero1 sp mbs1 interleaved recompute=layers:2.

    To fill in before the launch:
      RECIPE: the recipe of your model, as megatron.bridge.recipes.…:function (variable of the environment)
    """

    import dataclasses
    import importlib
    import sys

    import torch
    from megatron.bridge.training.config import ConfigContainer
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.enums import AttnBackend


    def apply(cfg: ConfigContainer) -> ConfigContainer:
        """Sets what the plan and its model say."""
        from megatron.bridge import AutoBridge

        cfg.model = AutoBridge.from_hf_pretrained("org/model").to_megatron_provider(load_weights=False)
        parts = {name: part for name, part in vars(cfg).items() if dataclasses.is_dataclass(part)}
        before = {name: set(vars(part)) for name, part in parts.items()}
        cfg.model.pipeline_model_parallel_layout = None
        cfg.model.num_layers_in_first_pipeline_stage = None
        cfg.model.num_layers_in_last_pipeline_stage = None
        cfg.model.recompute_modules = None
        cfg.model.mtp_num_layers = None
        cfg.model.overlap_p2p_comm = True
        cfg.dist.use_tp_pp_dp_mapping = False
        cfg.ddp.use_megatron_fsdp = False
        cfg.ddp.num_distributed_optimizer_instances = 1
        cfg.ddp.average_in_collective = False
        cfg.model.cuda_graph_impl = "none"
        cfg.model.cuda_graph_modules = []
        cfg.comm_overlap = None
        cfg.model.num_layers = 32
        cfg.model.hidden_size = 4096
        cfg.model.vocab_size = 128256
        cfg.model.should_pad_vocab = False
        cfg.model.make_vocab_size_divisible_by = 1
        cfg.model.share_embeddings_and_output_weights = False
        cfg.model.num_attention_heads = 32
        cfg.model.multi_latent_attention = False
        cfg.model.num_query_groups = 8
        cfg.model.kv_channels = 128
        cfg.model.qk_layernorm = False
        cfg.model.softmax_type = "vanilla"
        cfg.model.add_bias_linear = False
        cfg.model.add_qkv_bias = False
        cfg.model.hidden_dropout = 0.0
        cfg.model.attention_dropout = 0.0
        cfg.model.init_method_std = 0.02
        cfg.model.normalization = "RMSNorm"
        cfg.model.layernorm_epsilon = 1.0e-5
        cfg.model.layernorm_zero_centered_gamma = False
        cfg.model.rotary_base = 500000
        cfg.model.rotary_percent = 1.0
        cfg.model.rotary_interleaved = False
        cfg.model.position_embedding_type = "rope"
        cfg.model.rope_scaling = True
        cfg.model.rope_scaling_factor = 8.0
        cfg.model.ffn_hidden_size = 14336
        cfg.model.gated_linear_unit = True
        cfg.model.activation_func = torch.nn.functional.silu
        cfg.model.bias_dropout_fusion = True
        cfg.model.masked_softmax_fusion = True
        cfg.model.gradient_accumulation_fusion = True
        cfg.model.cross_entropy_loss_fusion = False
        cfg.model.bias_activation_fusion = True
        cfg.model.apply_rope_fusion = True
        cfg.model.attention_backend = AttnBackend.auto
        cfg.model.tensor_model_parallel_size = 4
        cfg.model.pipeline_model_parallel_size = 2
        cfg.model.context_parallel_size = 1
        cfg.model.sequence_parallel = True
        cfg.model.virtual_pipeline_model_parallel_size = 2
        cfg.train.micro_batch_size = 1
        cfg.train.global_batch_size = 256
        cfg.model.seq_length = 4096
        cfg.ddp.grad_reduce_in_fp32 = True
        cfg.ddp.use_distributed_optimizer = True
        cfg.optimizer.use_distributed_optimizer = True
        cfg.model.recompute_granularity = "full"
        cfg.model.recompute_method = "block"
        cfg.model.recompute_num_layers = 2
        cfg.ddp.overlap_grad_reduce = True
        cfg.ddp.overlap_param_gather = True
        cfg.optimizer.overlap_param_gather = True
        # No checks for NaN and Inf, as the prediction assumed: training does not stop at the first one; losses are still logged.
        cfg.rerun_state_machine.check_for_nan_in_loss = False
        cfg.ddp.check_for_nan_in_grad = False
        cfg.mixed_precision = "bf16_mixed"
        cfg.dataset.seq_length = 4096
        cfg.tokenizer.tokenizer_type = "HuggingFaceTokenizer"
        cfg.tokenizer.tokenizer_model = "org/tokenizer"
        cfg.dataset.blend = (["/data/text"], None)
        lost = [f"{name}.{field}" for name, part in parts.items() for field in vars(part) if field not in before[name]]
        if lost:
            raise SystemExit(f"the recipe has no {', '.join(lost)}: give the recipe of the plan's model")
        return cfg


    if __name__ == "__main__":
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        module, function = sys.argv[1].split(":")
        pretrain(apply(getattr(importlib.import_module(module), function)()), forward_step)
    "#);
}

#[test]
fn torchtitan_toml() {
    let text = file(
        "llama3-8b",
        "tp=4,pp=2,stages=15/17,cp=2,cp_kind=all_gather,zero=3,recompute=selective_ops",
        Dialect::Torchtitan02,
    );
    insta::assert_snapshot!(text, @r#"
    # vescale-plan 0123456789abcdef · llama3-8b on 64 GPUs: tp4 pp2 cp2(all_gather) dp4 zero3 reshard=on sp mbs1 1f1b recompute=selective_ops stages=15/17
    [model]
    name = "llama3"
    flavor = "8B"
    hf_assets_path = "org/tokenizer"

    [training]
    dataset = "/data/text"
    local_batch_size = 64
    global_batch_size = 256
    seq_len = 4096
    dtype = "float32"
    mixed_precision_param = "bfloat16"
    mixed_precision_reduce = "float32"

    [parallelism]
    data_parallel_replicate_degree = 1
    data_parallel_shard_degree = 4
    tensor_parallel_degree = 4
    context_parallel_degree = 2
    pipeline_parallel_degree = 2
    expert_parallel_degree = 1
    fsdp_reshard_after_forward = "always"
    enable_async_tensor_parallel = false
    expert_tensor_parallel_degree = 1
    pipeline_parallel_schedule = "1F1B"
    pipeline_parallel_microbatch_size = 1
    module_fqns_per_model_part = [
        ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "layers.5", "layers.6", "layers.7", "layers.8", "layers.9", "layers.10", "layers.11", "layers.12", "layers.13", "layers.14"],
        ["layers.15", "layers.16", "layers.17", "layers.18", "layers.19", "layers.20", "layers.21", "layers.22", "layers.23", "layers.24", "layers.25", "layers.26", "layers.27", "layers.28", "layers.29", "layers.30", "layers.31", "norm", "output"],
    ]

    [activation_checkpoint]
    mode = "selective"
    selective_ac_option = "op"

    [compile]
    enable = false
    components = ["model"]
    "#);
}

#[test]
fn torchtitan_python() {
    let text = file(
        "llama3-8b",
        "tp=4,pp=2,vpp=2,schedule=zb-v,zero=3,recompute=full",
        Dialect::Torchtitan03,
    );
    insta::assert_snapshot!(text, @r#"
    """vescale-plan 0123456789abcdef · llama3-8b on 64 GPUs: tp4 pp2 vpp2 dp8 zero3 reshard=on sp mbs1 zb-v recompute=full."""

    from torchtitan.config import CompileConfig, ParallelismConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_8b
    from torchtitan.trainer import Trainer


    def apply(config: Trainer.Config) -> Trainer.Config:
        """Sets what the plan decides."""
        config.hf_assets_path = "org/tokenizer"
        config.dataloader.dataset = "/data/text"
        config.training.local_batch_size = 32
        config.training.global_batch_size = 256
        config.training.seq_len = 4096
        config.training.dtype = "float32"
        config.training.mixed_precision_param = "bfloat16"
        config.training.mixed_precision_reduce = "float32"
        config.training.disable_cuda_graphs = True
        config.parallelism = ParallelismConfig(
            data_parallel_replicate_degree=1,
            data_parallel_shard_degree=8,
            tensor_parallel_degree=4,
            context_parallel_degree=1,
            pipeline_parallel_degree=2,
            expert_parallel_degree=1,
            fsdp_reshard_after_forward="always",
            enable_sequence_parallel=True,
            pipeline_parallel_schedule="ZBVZeroBubble",
            pipeline_parallel_microbatch_size=1,
            module_fqns_per_model_part=[
                ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "layers.5", "layers.6", "layers.7"],
                ["layers.8", "layers.9", "layers.10", "layers.11", "layers.12", "layers.13", "layers.14", "layers.15"],
                ["layers.16", "layers.17", "layers.18", "layers.19", "layers.20", "layers.21", "layers.22", "layers.23"],
                ["layers.24", "layers.25", "layers.26", "layers.27", "layers.28", "layers.29", "layers.30", "layers.31", "norm", "lm_head"],
            ],
        )
        config.activation_checkpoint = FullAC.Config()
        config.compile = CompileConfig(enable=False, enable_async_tensor_parallel=False, components=["model"])
        return config


    def plan() -> Trainer.Config:
        """The model's configuration under the plan."""
        config = llama3_8b()
        config.model_spec = model_registry("8B")
        return apply(config)
    "#);
}

#[test]
fn torchtitan_main() {
    let text = file(
        "llama3-8b",
        "tp=2,zero=3,dp_replicate=2",
        Dialect::TorchtitanMain,
    );
    insta::assert_snapshot!(text, @r#"
    """vescale-plan 0123456789abcdef · llama3-8b on 64 GPUs: tp2 pp1 dp16x2 zero3 sp mbs1 recompute=none."""

    from torchtitan.config import CompileConfig, ParallelismConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_8b
    from torchtitan.trainer import Trainer


    def apply(config: Trainer.Config) -> Trainer.Config:
        """Sets what the plan decides."""
        config.hf_assets_path = "org/tokenizer"
        config.dataloader.dataset = "/data/text"
        config.training.num_tokens_per_microbatch_per_dp_rank = 4096
        config.training.num_tokens_per_train_step = 1048576
        config.training.max_context_length = 4096
        config.training.dtype = "float32"
        config.training.mixed_precision_param = "bfloat16"
        config.training.mixed_precision_reduce = "float32"
        config.training.disable_cuda_graphs = True
        config.parallelism = ParallelismConfig(
            data_parallel_replicate_degree=2,
            data_parallel_shard_degree=16,
            tensor_parallel_degree=2,
            context_parallel_degree=1,
            pipeline_parallel_degree=1,
            expert_parallel_degree=1,
            fsdp_reshard_after_forward="always",
            enable_sequence_parallel=True,
        )
        config.activation_checkpoint = None
        config.compile = CompileConfig(enable=False, enable_async_tensor_parallel=False, components=["model"])
        return config


    def plan() -> Trainer.Config:
        """The model's configuration under the plan."""
        config = llama3_8b()
        config.model_spec = model_registry("8B")
        return apply(config)
    "#);
}

#[test]
fn deepspeed() {
    let text = file(
        "llama3-8b",
        "tp=2,sp=off,cp=2,cp_kind=all_to_all,zero=3,recompute=full",
        Dialect::DeepSpeed,
    );
    insta::assert_snapshot!(text, @r#"
    {
      "bf16": {
        "enabled": true
      },
      "communication_data_type": "bf16",
      "train_batch_size": 256,
      "train_micro_batch_size_per_gpu": 1,
      "gradient_accumulation_steps": 16,
      "zero_optimization": {
        "stage": 3,
        "overlap_comm": true,
        "reduce_bucket_size": 40000000
      },
      "tensor_parallel": {
        "autotp_size": 2
      },
      "sequence_parallel_size": 2,
      "activation_checkpointing": {
        "number_checkpoints": 32
      }
    }
    "#);
}

#[test]
fn accelerate() {
    let text = file(
        "llama3-8b",
        "zero=3,dp_replicate=2,recompute=full",
        Dialect::Accelerate,
    );
    insta::assert_snapshot!(text, @r#"
    # vescale-plan 0123456789abcdef · llama3-8b on 64 GPUs: tp1 pp1 dp32x2 zero3 mbs1 recompute=full
    # To fill in before the launch:
    #   TRAIN_SCRIPT: your training script, which makes the model that the plan is for; it finds what --hf-id, --tokenizer and --data gave in MODEL, TOKENIZER and DATA (variable of the environment)
    compute_environment: LOCAL_MACHINE
    distributed_type: FSDP
    mixed_precision: bf16
    num_machines: 8
    machine_rank: 0
    num_processes: 64
    main_training_function: main
    use_cpu: false
    debug: false
    fsdp_config:
      fsdp_version: 2
      fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
      fsdp_reshard_after_forward: true
      fsdp_activation_checkpointing: true
      fsdp_state_dict_type: SHARDED_STATE_DICT
    parallelism_config:
      parallelism_config_dp_replicate_size: 2
      parallelism_config_dp_shard_size: 32
      parallelism_config_tp_size: 1
      parallelism_config_cp_size: 1
    "#);
}

#[test]
fn axolotl() {
    let text = file("llama3-8b", "cp=2,zero=3,mbs=2", Dialect::Axolotl);
    insta::assert_snapshot!(text, @r#"
    # vescale-plan 0123456789abcdef · llama3-8b on 64 GPUs: tp1 pp1 cp2(ring) dp32 zero3 mbs2 recompute=none
    # To fill in before the launch:
    #   FILL_IN_LEARNING_RATE: your learning rate
    base_model: org/model
    tokenizer_config: org/tokenizer
    datasets: [{path: /data/text, type: completion}]
    sequence_len: 4096
    micro_batch_size: 2
    gradient_accumulation_steps: 4
    bf16: true
    gradient_checkpointing: false
    learning_rate: FILL_IN_LEARNING_RATE
    dp_shard_size: 32
    dp_replicate_size: 1
    tensor_parallel_size: 1
    context_parallel_size: 2
    ring_attn_func: batch_ring
    attn_implementation: flash_attention_2
    fsdp_version: 2
    fsdp_config:
      reshard_after_forward: true
      auto_wrap_policy: TRANSFORMER_BASED_WRAP
      state_dict_type: SHARDED_STATE_DICT
    "#);
}

#[test]
fn nanotron() {
    let text = file(
        "llama2-7b",
        "tp=4,pp=4,zero=0,recompute=full",
        Dialect::Nanotron,
    );
    insta::assert_snapshot!(text, @r#"
    # vescale-plan 0123456789abcdef · llama2-7b on 64 GPUs: tp4 pp4 dp4 zero0 sp mbs1 1f1b recompute=full overlap=grad+pp
    general:
      project: vescale-plan
      run: "0123456789abcdef"
    parallelism:
      dp: 4
      pp: 4
      tp: 4
      context_parallel_size: 1
      expert_parallel_size: 1
      pp_engine: "1f1b"
      tp_mode: REDUCE_SCATTER
      tp_linear_async_communication: false
      recompute_layer: true
    optimizer:
      zero_stage: 0
      accumulate_grad_in_fp32: true
      clip_grad: 1.0
      weight_decay: 0.01
      optimizer_factory:
        name: adamW
        adam_beta1: 0.9
        adam_beta2: 0.95
        adam_eps: 1.0e-8
        torch_adam_is_fused: true
      learning_rate_scheduler:
        learning_rate: 0.0003
        lr_warmup_steps: 2
        lr_warmup_style: linear
        lr_decay_style: cosine
        min_decay_lr: 1.0e-5
    tokens:
      micro_batch_size: 1
      batch_accumulation_per_replica: 64
      sequence_length: 4096
      train_steps: 100
    model:
      dtype: bfloat16
      make_vocab_size_divisible_by: 1
      model_config:
        is_llama_config: true
        hidden_size: 4096
        num_hidden_layers: 32
        vocab_size: 32000
        max_position_embeddings: 4096
        tie_word_embeddings: false
        num_attention_heads: 32
        attention_bias: false
        num_key_value_heads: 32
        intermediate_size: 11008
        hidden_act: silu
        rms_norm_eps: 1.0e-5
        rope_theta: 10000.0
        rope_interleaved: false
        initializer_range: 0.02
      init_method:
        std: 0.02
    tokenizer:
      tokenizer_name_or_path: org/tokenizer
    data_stages: [{name: stable, start_training_step: 1, data: {dataset: {hf_dataset_or_datasets: /data/text, text_column_name: text}, num_loading_workers: 1, seed: 42}}]
    "#);
}

#[test]
fn vescale() {
    let text = file("llama3-8b", "tp=4,pp=4,zero=1", Dialect::VeScale);
    insta::assert_snapshot!(text, @r#"
    """vescale-plan 0123456789abcdef · llama3-8b on 64 GPUs: tp4 pp4 dp4 zero1 sp mbs1 1f1b recompute=none.

    To fill in before the launch:
      TRAIN_SCRIPT: your training script, which makes the model that the plan is for; it finds what --hf-id, --tokenizer and --data gave in MODEL, TOKENIZER and DATA (variable of the environment)
    """

    from vescale.dtensor.placement_types import InterleavedShard, Partial, Replicate, Shard
    from vescale.plan import ModeType, PipelineParallelPlan, PipelineScheduleType, PipelineSplitMethodType

    sharding_plan = {
        "parameter": {
            r"(.*\.)?self_attn\.(q_proj|k_proj|v_proj)\.weight": [Shard(0)],
            r"(.*\.)?self_attn\.o_proj\.weight": [Shard(1)],
        },
        "forward": {
            r"(.*\.)?lm_head\.input": [[Replicate()]],
        },
    }

    # Each split point ends a stage.
    pipeline_plan = PipelineParallelPlan(
        mode=ModeType.GRAPH_EAGER,
        split_method=PipelineSplitMethodType.MANUAL,
        num_stages=4,
        virtual_chunks=1,
        split_points=["model.layers.7", "model.layers.15", "model.layers.23"],
        overlap_p2p_comm=True,
        schedule_type=PipelineScheduleType.SIMPLE_1F1B,
    )

    mesh_shape = {"PP": 4, "DP": 4, "TP": 4}
    use_distributed_optimizer = True
    overlap_grad_reduce = True
    overlap_param_gather = True
    micro_batch_size = 1
    num_microbatches = 64
    global_batch_size = 256
    sequence_length = 4096
    dtype = "bfloat16"
    "#);
}
