"""What TRL, the Trainer of transformers, verl, OpenRLHF, slime and prime-rl call the options,
without their prefixes (actor_rollout_ref.rollout.n is n). A wrong name is answered with ours; none
is accepted.
"""

import re

# "option: names", or "option value: names" where the names stand for a value of the option
TABLE = """
objective: advantage_estimator adv_estimator algorithm algo estimator rl_algorithm advantage
    scale_rewards
objective verifree: verifree
data: train_file train_files prompt_data train_data dataset_path
test_data: val_files val_file eval_dataset eval_data eval_prompt_data validation_file test_file
hub: dataset_name dataset dataset_config
prompt_key: input_key prompt_column prompt_field
answer_key: label_key answer_column
max_prompt_tokens: max_prompt_length prompt_max_len max_prompt_len rollout_max_prompt_len
chat_template: chat_template_path custom_chat_template
chat_template_kwargs: apply_chat_template_kwargs template_kwargs enable_thinking
stop: stop_strings stop_sequences stop_words rollout_stop stop_string
environment: environment_factory env_class
max_turns: max_tool_calling_iterations max_steps_per_episode
reward: reward_funcs reward_function custom_reward_function reward_fn remote_rm_url
    reward_pretrain custom_rm_path reward_model_path rm_type reward_model_name_or_path
reward_workers: num_workers reward_num_workers
reward_source vote: srt ttrl majority_vote self_reward
reward_source rlpr: rlpr probability_reward
overlong_buffer: overlong_buffer_len overlong_buffer_cfg soft_punish_cache
overlong_penalty: overlong_penalty_factor
truncated mask: mask_truncated_completions overlong_filtering
rollout vllm: use_vllm vllm vllm_mode vllm_num_engines
vllm_tensor_parallel: vllm_tensor_parallel_size tensor_model_parallel_size tensor_parallel_size
vllm_url: vllm_server_base_url vllm_server_host
prompts: per_device_train_batch_size train_batch_size batch_size rollout_batch_size
    global_batch_size prompts_per_step num_prompts generation_batch_size
rollouts: num_generations n rollout_n n_samples_per_prompt num_rollouts group_size
    samples_per_prompt n_rollouts num_samples num_return_sequences rollouts_per_prompt samples
    rollouts_per_example
dynamic_sampling: dynamic_filtering filter_groups
std_filter: std_filter_beta
max_new_tokens: max_completion_length max_response_length generate_max_len max_tokens max_length
    response_length rollout_max_response_len max_gen_len max_completion_tokens
temperature: rollout_temperature sampling_temperature
kv_cache_gb: vllm_gpu_memory_utilization gpu_memory_utilization
correction: rollout_is rollout_rs vllm_importance_sampling_mode
    vllm_importance_sampling_correction use_tis rollout_correction
correction sequence_mask: off_policy_mask_threshold use_opsm opsm_delta
importance_cap: vllm_importance_sampling_cap vllm_importance_sampling_clip_max tis_imp_ratio_cap
    importance_sampling_cap rollout_is_threshold
correction_options: rollout_rs_threshold vllm_importance_sampling_clip_min
steps: max_steps num_train_epochs total_training_steps total_epochs num_episodes epochs
    num_epochs num_steps num_rollout iterations train_steps
lr: learning_rate actor_learning_rate optim_lr
lr_schedule: lr_scheduler_type lr_scheduler lr_decay_style scheduler
warmup_steps: warmup_ratio lr_warmup_steps lr_warmup_ratio lr_warmup_steps_ratio warmup
    num_warmup_steps
updates_per_step: ppo_mini_batch_size mini_batch_size steps_per_generation
weight_decay: l2 adam_weight_decay
beta2: adam_beta2 adam_betas
clip_grad: max_grad_norm grad_clip max_norm gradient_clipping grad_norm
token_budget: gradient_accumulation_steps micro_train_batch_size ppo_micro_batch_size_per_gpu
    max_tokens_per_gpu ppo_max_token_len_per_gpu micro_batch_size ppo_micro_batch_size
checkpoint_activations: gradient_checkpointing enable_gradient_checkpointing
    activation_checkpointing
loss: policy_loss_type loss_fn policy_loss loss_mode
loss gspo: importance_sampling_level
loss_options: sapo_temperature_pos sapo_temperature_neg tau_pos tau_neg vespo_k_pos vespo_k_neg
    vespo_lambda_pos vespo_lambda_neg dppo_mask_low dppo_mask_high kl_tau
clip_low: epsilon cliprange clip_ratio clip_ratio_low eps_clip eps_clip_low_high epsilon_low
    clip_eps clip_range
clip_high: epsilon_high clip_ratio_high eps_clip_high
aggregation: loss_type loss_agg_mode loss_reduction
top_entropy: top_entropy_quantile entropy_top_ratio
entropy_coef: entropy_coeff entropy_loss_coef entropy_bonus ent_coef
kl_coef: beta kl_loss_coef init_kl_coef kl_beta kl_coeff use_kl_loss kl_penalty_coef
kl: kl_loss_type kl_estimator kl_penalty
reference: teacher_model teacher teacher_model_name_or_path ref_model reward_ref_model
model: model_name_or_path model_path model_name pretrain hf_checkpoint pretrained_model
    base_model model_id tokenizer
lora_rank: lora_r use_peft r peft
lora_targets: lora_target_modules target_modules
eval_every: eval_steps test_freq eval_interval eval_strategy evaluation_strategy eval_freq
eval_prompts: limit num_eval_prompts max_eval_samples
eval_samples: n_samples_per_eval_prompt eval_num_samples num_generations_eval
log_to: report_to logger
log_to wandb: use_wandb wandb wandb_project
out: output_dir save_path ckpt_path default_local_dir run_name experiment_name output save
    logging_dir out_dir log_dir
resume: resume_from_checkpoint resume_from_path load_checkpoint resume_mode resume_from load
seed: data_seed random_seed
device: use_cpu no_cuda
dtype: torch_dtype precision mixed_precision
dtype bfloat16: bf16
compile: torch_compile use_torch_compile
sharding full: fsdp deepspeed zero_stage fsdp_config
threads: num_threads n_threads cpu_threads
save_every: save_steps save_freq save_interval save_strategy
keep_checkpoints: save_total_limit max_ckpt_num max_actor_ckpt_to_keep
dry_run: dryrun
gae_gamma: gamma discount
gae_lambda: lam lambd lambda_ gae_lam
value_clip: cliprange_value value_clip_range clip_range_vf clip_range_value
critic_lr: critic_learning_rate value_lr vf_lr
"""
OTHER_NAMES = {
    name: option
    for line in re.sub(r"\n +", " ", TABLE.strip()).splitlines()
    for option, names in [line.split(": ")]
    for name in names.split()
}
_EPOCHS = "--steps sets the length: an epoch of n prompts has n / --prompts steps"
SENTENCES = {
    **dict.fromkeys(("epochs", "num_epochs", "total_epochs", "num_train_epochs"), _EPOCHS),
    "push_to_hub": "`hf upload ORG/NAME RUN/latest` uploads a checkpoint",
    "callbacks": "maxrl_fast.Session is for a loop of your own",
    "wandb_project": "--log-to wandb logs to the project in the environment's WANDB_PROJECT",
}
# the number of processes, which is torchrun's
PROCESSES = re.compile(
    r"\w*gpus(_per_node)?|\w*nodes|nproc_per_node|num_processes|world_size|devices"
)
# names of options of maxrl_fast.train that maxrl_fast.evaluate does not have
IN_EVALUATION = {"prompts": "eval_prompts", "rollouts": "samples", "eval_samples": "samples"}
