//! What other trainers call a setting, for whoever types it from memory.

use engine::passes::nearest;

/// A name elsewhere, and what it is here: keys, of which the first that a recipe has counts, or what is typed instead of a key.
pub(super) const ELSEWHERE: &[(&str, &[&str])] = &[
    // Schedule and optimizer.
    ("lr", &["learning_rate"]),
    ("max_lr", &["learning_rate"]),
    ("min_lr", &["final_rate"]),
    ("lr_scheduler", &["schedule"]),
    ("lr_scheduler_type", &["schedule"]),
    ("scheduler", &["schedule"]),
    ("lr_decay_iters", &["horizon"]),
    ("warmup_steps", &["warmup"]),
    ("warmup_iters", &["warmup"]),
    ("warmup_ratio", &["warmup"]),
    ("epochs", &["epochs", "steps"]),
    ("num_epochs", &["epochs", "steps"]),
    ("num_train_epochs", &["epochs", "steps"]),
    ("max_epochs", &["epochs", "steps"]),
    ("max_steps", &["steps"]),
    ("max_iters", &["steps"]),
    ("num_steps", &["steps"]),
    ("iterations", &["steps"]),
    ("optim", &["optimizer"]),
    ("wd", &["weight_decay"]),
    ("betas", &["beta1"]),
    ("adam_beta1", &["beta1"]),
    ("adam_beta2", &["beta2"]),
    ("epsilon", &["eps"]),
    ("adam_epsilon", &["eps"]),
    ("grad_clip", &["clip"]),
    ("gradient_clip_val", &["clip"]),
    ("max_grad_norm", &["clip"]),
    ("ema_decay", &["ema"]),
    // Batches and rows.
    ("batch_size", &["batch"]),
    ("micro_batch_size", &["batch"]),
    ("train_batch_size", &["batch"]),
    ("per_device_train_batch_size", &["batch"]),
    ("gradient_accumulation_steps", &["accumulate"]),
    ("grad_accum", &["accumulate"]),
    ("accumulate_grad_batches", &["accumulate"]),
    ("max_length", &["seq"]),
    ("max_seq_length", &["seq"]),
    ("max_seq_len", &["seq"]),
    ("sequence_length", &["seq"]),
    ("context_length", &["seq"]),
    ("block_size", &["seq"]),
    ("n_ctx", &["seq"]),
    ("n_positions", &["seq"]),
    ("max_position_embeddings", &["seq"]),
    ("packing", &["pack"]),
    ("validation_split", &["val_share"]),
    ("val_split", &["val_share"]),
    ("test_size", &["val_share"]),
    // Logs, evaluations, checkpoints.
    ("logging_steps", &["log_every"]),
    ("log_interval", &["log_every"]),
    ("eval_steps", &["eval_every"]),
    ("eval_interval", &["eval_every"]),
    ("eval_iters", &["eval_batches"]),
    ("eval_batch_size", &["eval_batch"]),
    ("per_device_eval_batch_size", &["eval_batch"]),
    ("save_steps", &["save_every"]),
    ("save_total_limit", &["keep"]),
    ("save_top_k", &["keep"]),
    ("early_stopping_patience", &["patience"]),
    ("metric_for_best_model", &["best_metric"]),
    ("random_seed", &["seed"]),
    // Models and adapters.
    ("n_layer", &["layers"]),
    ("num_layers", &["layers"]),
    ("num_hidden_layers", &["layers"]),
    ("depth", &["layers"]),
    ("n_head", &["heads"]),
    ("num_heads", &["heads"]),
    ("num_attention_heads", &["heads"]),
    ("num_key_value_heads", &["kv_heads"]),
    ("n_kv_heads", &["kv_heads"]),
    ("n_embd", &["dim"]),
    ("hidden_size", &["dim"]),
    ("hidden_dim", &["dim"]),
    ("d_model", &["dim"]),
    ("embed_dim", &["dim"]),
    ("width", &["dim"]),
    ("intermediate_size", &["hidden"]),
    ("ffn_dim", &["hidden"]),
    ("d_ff", &["hidden"]),
    ("vocab_size", &["vocab"]),
    ("rms_norm_eps", &["norm_eps"]),
    ("layer_norm_epsilon", &["norm_eps"]),
    ("tie_word_embeddings", &["tied"]),
    ("model", &["base"]),
    ("model_name", &["base"]),
    ("model_name_or_path", &["base"]),
    ("pretrained", &["base"]),
    ("lora_r", &["rank"]),
    ("lora_rank", &["rank"]),
    ("r", &["rank"]),
    ("lora_alpha", &["alpha"]),
    ("lora_dropout", &["dropout"]),
    ("target_modules", &["targets"]),
    ("load_in_4bit", &["bits"]),
    ("load_in_8bit", &["bits"]),
    ("max_new_tokens", &["new_tokens"]),
    // What is no key here.
    ("output_dir", &["--out"]),
    ("out_dir", &["--out"]),
    ("dataset", &["--data"]),
    ("dataset_name", &["--data"]),
    ("data_dir", &["--data"]),
    ("train_file", &["--data"]),
    ("resume_from_checkpoint", &["--resume"]),
    ("num_gpus", &["--ranks"]),
    ("nproc_per_node", &["--ranks"]),
    ("device", &["--device"]),
];

/// What was probably meant by `key` in a section (empty: none was written), among the names of all keys with their sections. A key is named
/// with its section if `key` was written with one, or if `full`.
pub fn meant(section: &str, key: &str, all: &[String], full: bool) -> Option<String> {
    let bare = |name: &str| name.rsplit('.').next().unwrap_or_default().to_string();
    let find = |wanted: &str| {
        let own = all.iter().find(|name| **name == format!("{section}.{wanted}"));
        own.or_else(|| all.iter().find(|name| bare(name) == wanted))
    };
    let plain = key.to_lowercase().replace('-', "_");
    // The right key in the wrong section, or written in another way.
    if let Some(name) = find(&plain) {
        return Some(shown(name, section, full));
    }
    if let Some((_, meant)) = ELSEWHERE.iter().find(|e| e.0 == plain) {
        let flag = || meant.iter().find(|m| m.starts_with("--")).map(|m| m.to_string());
        if let Some(found) = meant.iter().find_map(|m| find(m)).map(|name| shown(name, section, full)).or_else(flag) {
            return Some(found);
        }
    }
    if let Some(pass) = engine::passes::all().map(|p| p.name()).find(|p| *p == plain.replace('_', "-")).or_else(|| pass_elsewhere(&plain)) {
        return Some(format!("--pass {pass}=auto"));
    }
    let of_section: Vec<String> = all.iter().filter(|name| name.starts_with(&format!("{section}."))).map(|name| bare(name)).collect();
    let everywhere: Vec<String> = all.iter().map(|name| bare(name)).collect();
    let near = nearest(key, of_section.iter().map(String::as_str)).or_else(|| nearest(key, everywhere.iter().map(String::as_str)))?;
    find(near).map(|name| shown(name, section, full))
}

/// What a flag of another trainer (`--lr`) is here: a key to be set, or a flag.
pub fn flag(typed: &str, all: &[String]) -> Option<String> {
    let plain = typed.trim_start_matches('-').to_lowercase().replace('-', "_");
    let has = |key: &str| all.iter().any(|name| name == key);
    if has(&plain) {
        return Some(format!("--set {plain}=VALUE"));
    }
    let (_, meant) = ELSEWHERE.iter().find(|e| e.0 == plain)?;
    let key = meant.iter().find(|m| has(m)).map(|key| format!("--set {key}=VALUE"));
    key.or_else(|| meant.iter().find(|m| m.starts_with("--")).map(|m| m.to_string()))
}

/// Of what people set in a config file elsewhere, what a pass does here.
fn pass_elsewhere(plain: &str) -> Option<&'static str> {
    let words =
        ["amp", "autocast", "mixed_precision", "gradient_checkpointing", "activation_checkpointing", "flash_attention", "fsdp", "compile"];
    words.contains(&plain).then(|| engine::passes::meant(plain)).flatten()
}

fn shown(name: &str, section: &str, full: bool) -> String {
    match full || !section.is_empty() {
        true => name.to_string(),
        false => name.rsplit('.').next().unwrap_or_default().to_string(),
    }
}
