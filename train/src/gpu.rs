//! Finds the GPU's libraries and the cache for the engine, which reads no environment itself.

use engine::cuda::Folders;
use engine::{Cpu, Cuda, Device};
use std::path::{Path, PathBuf};

/// Where CUDA's libraries may be: LD_LIBRARY_PATH, a toolkit, the wheels of a Python environment; and where kernels are cached.
pub fn folders() -> Folders {
    let env = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let split = |name: &str| std::env::var_os(name).map(|v| std::env::split_paths(&v).collect::<Vec<_>>()).unwrap_or_default();
    let mut libraries = split("LD_LIBRARY_PATH");
    for toolkit in [env("CUDA_HOME"), env("CUDA_PATH"), Some("/usr/local/cuda".into())].into_iter().flatten() {
        libraries.push(toolkit.join("lib64"));
    }
    let pythons = env("VIRTUAL_ENV")
        .into_iter()
        .chain(split("PATH").into_iter().filter(|p| p.join("python3").exists()).filter_map(|p| p.parent().map(Path::to_path_buf)));
    for prefix in pythons {
        libraries.extend(wheels(&prefix));
    }
    libraries.retain(|p| p.is_dir());
    Folders { libraries, cache: cache() }
}

/// Where everything is kept that could be made again.
pub fn cache() -> PathBuf {
    let env = |name: &str| std::env::var_os(name).map(PathBuf::from);
    env("XDG_CACHE_HOME").or_else(|| env("HOME").map(|h| h.join(".cache"))).unwrap_or_else(std::env::temp_dir).join("kiln")
}

/// PREFIX/lib/python3.*/site-packages/nvidia/*/lib
fn wheels(prefix: &Path) -> Vec<PathBuf> {
    let children = |p: PathBuf| std::fs::read_dir(p).into_iter().flatten().flatten().map(|e| e.path()).collect::<Vec<_>>();
    let pythons =
        children(prefix.join("lib")).into_iter().filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")));
    pythons.flat_map(|p| children(p.join("site-packages/nvidia"))).map(|p| p.join("lib")).collect()
}

/// `auto`, `cpu`, `cuda` or `cuda:N`.
pub fn open(name: &str, threads: Option<usize>) -> Result<Device, String> {
    let cpu = || Device::cpu(threads.map_or_else(Cpu::all_cores, Cpu::new));
    let gpu = |ordinal: usize| Cuda::open(ordinal, &folders()).and_then(Device::cuda).map_err(|e| e.to_string());
    match name {
        "cpu" => Ok(cpu()),
        "auto" => Ok(gpu(0).unwrap_or_else(|why| {
            // Without a driver there is no GPU to speak of; with one, something is missing.
            if !why.contains("libcuda was not found") {
                crate::warn!("on the CPU, because the GPU cannot be used: {why}");
            }
            cpu()
        })),
        "cuda" => gpu(0).map_err(|e| format!("--device cuda: {e} (`kiln doctor` says what was found; --device cpu always works)")),
        other => match other.strip_prefix("cuda:").map(str::parse) {
            Some(Ok(ordinal)) => {
                gpu(ordinal).map_err(|e| format!("--device {other}: {e} (`kiln doctor` says what was found; --device cpu always works)"))
            }
            _ => Err(format!("--device {other}: there are auto, cpu, cuda and cuda:N")),
        },
    }
}
