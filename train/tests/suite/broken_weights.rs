//! Weights that are not finite: refused by name by every command that reads them.

use crate::common::{copy, half_written, kiln, text};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use std::fs;
use std::path::Path;
use tempfile::tempdir;

/// Sets a number of a safetensors file; with `dtype` all tensors become of that type.
fn broken_weight(path: &Path, name: &str, dtype: Dtype, number: f32) {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let one = |v: f32| match dtype {
        Dtype::BF16 => half::bf16::from_f32(v).to_le_bytes().to_vec(),
        Dtype::F16 => half::f16::from_f32(v).to_le_bytes().to_vec(),
        _ => v.to_le_bytes().to_vec(),
    };
    let all: Vec<(String, Vec<usize>, Vec<u8>)> = file
        .iter()
        .map(|(n, view)| {
            let mut numbers: Vec<f32> = bytemuck::pod_collect_to_vec(view.data());
            let last = numbers.len() - 1;
            numbers[last] = if n == name { number } else { numbers[last] };
            (n.to_string(), view.shape().to_vec(), numbers.into_iter().flat_map(one).collect())
        })
        .collect();
    let views = all.iter().map(|(n, shape, data)| (n, TensorView::new(dtype, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// In every type, in a model's folder, in adapters, for every command that reads them, and where matrices are quantized as they are read.
#[test]
fn weights_that_are_not_finite_are_refused_by_name_wherever_they_are_read() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    let small = "train decoder --device cpu --threads 1 --set batch=2 --set eval_batches=1 --steps 1";
    let run = |args: &str| kiln(args.split_whitespace());
    let sizes = "--set model.layers=1 --set model.dim=64 --set model.hidden=128 --set model.heads=2 --set model.kv_heads=2 --set seq=32";
    run(&format!("{small} {sizes} --out {}", at("run"))).ok();
    run(&format!("export {} --out {}", at("run"), at("model"))).ok();
    let tuned = format!("{small} --set model.base={} --set seq=32", at("model"));
    run(&format!("{tuned} --set model.train=lora --out {}", at("tuned"))).ok();
    run(&format!("export {} --out {}", at("tuned"), at("adapter"))).ok();
    run(&format!("check model {} --adapter {}", at("model"), at("adapter"))).ok();

    let adapter = dir.path().join("adapter/adapter_model.safetensors");
    let loaded = kiln::checkpoint::load_safetensors(&adapter).unwrap();
    let name = loaded.names().pop().unwrap();
    broken_weight(&adapter, &name, Dtype::F32, f32::NEG_INFINITY);
    let said = format!("'{name}' holds -inf");
    for command in ["check model {} --adapter {a}", "generate {} --adapter {a} --prompt a", "generate {a} --base {} --prompt a"] {
        run(&command.replace("{}", &at("model")).replace("{a}", &at("adapter"))).fails(&["adapter_model.safetensors", &said]);
    }
    run(&format!("{tuned} --set model.train=lora --init-from {} --out {}", at("adapter"), at("no"))).fails(&[&said]);

    let name = "model.layers.0.mlp.up_proj.weight";
    for (dtype, number) in [(Dtype::F32, f32::NAN), (Dtype::F16, f32::INFINITY), (Dtype::BF16, f32::NAN)] {
        let folder = format!("{dtype:?}");
        copy(&dir.path().join("model"), &dir.path().join(&folder));
        broken_weight(&dir.path().join(&folder).join("model.safetensors"), name, dtype, number);
        let said = format!("'{name}' holds {number}");
        let base = format!("{small} --set model.base={} --set seq=32 --out {}", at(&folder), at("no"));
        let mut commands = vec![format!("check model {}", at(&folder)), base.clone()];
        if dtype == Dtype::BF16 {
            commands.extend([
                format!("check model {} --ids 1", at(&folder)),
                format!("generate {} --prompt a", at(&folder)),
                format!("{base} --set model.train=lora --set model.bits=4"),
                format!("prune {} --out {}", at(&folder), at("no")),
                format!("export {} --format gguf --out {}", at(&folder), at("no.gguf")),
            ]);
        }
        commands.iter().for_each(|command| run(command).fails(&["model.safetensors", &said]));
    }
    assert!(!dir.path().join("no").exists() && !dir.path().join("no.gguf").exists() && half_written(dir.path()).is_empty());
}
