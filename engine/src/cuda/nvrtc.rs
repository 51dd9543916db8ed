//! Compiles CUDA source to cubins with NVRTC, with a cache on disk.

use super::cache;
use super::libraries::{Folders, find};
use crate::error::Error;
use crate::kernel::Arch;
use cudarc::nvrtc::{result, sys};
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use xxhash_rust::xxh3::xxh3_64;

const OPTIONS: &[&str] = &["--std=c++17", "-default-device"];

/// The 64-bit hash that kernels are cached by.
pub fn hash(text: &str) -> u64 {
    xxh3_64(text.as_bytes())
}

/// Newer versions of NVRTC produce cubins that a 13.0 driver does not load; older ones do not know all architectures.
fn supported(major: i32, minor: i32) -> Result<(), Error> {
    match major {
        13 => Ok(()),
        _ => Err(Error::Cuda(format!(
            "NVRTC {major}.{minor} was found, but version 13 is needed: `pip install \"nvidia-cuda-nvrtc==13.0.*\"` and name its folder first in LD_LIBRARY_PATH"
        ))),
    }
}

/// An NVRTC compiler for one architecture.
pub struct Compiler {
    arch: Arch,
    cache: PathBuf,
    /// NVRTC's version, as part of every cache entry's name.
    version: (i32, i32),
}

impl Compiler {
    /// Compiles with the NVRTC that is loaded, and keeps cubins in the folder `cache`.
    pub fn new(arch: Arch, cache: &Path) -> Result<Compiler, Error> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library was loaded; both pointers are to live integers.
        let status = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
        status.result().map_err(|e| Error::Cuda(format!("NVRTC does not work: {e:?}")))?;
        supported(major, minor)?;
        Ok(Compiler { arch, cache: cache.into(), version: (major, minor) })
    }

    /// NVRTC's version: (major, minor).
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// A compiler without a GPU, for checking that every kernel compiles. Loads the libraries.
    pub fn without_gpu(arch: Arch, folders: &Folders) -> Result<Compiler, Error> {
        let found = find(folders);
        match found.iter().filter(|f| f.name.starts_with("libnvrtc")).find_map(|f| f.problem()) {
            Some(problem) => Err(Error::Cuda(problem)),
            None => Compiler::new(arch, &folders.cache),
        }
    }

    /// One cubin for each source, or why it does not compile; from the cache or compiled, on as many threads as there are cores.
    pub fn compile_all(&self, texts: &[&str]) -> Vec<Result<Vec<u8>, Error>> {
        let next = AtomicUsize::new(0);
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(texts.len().max(1));
        let mut made: Vec<(usize, Result<Vec<u8>, Error>)> = std::thread::scope(|s| {
            let work = || {
                let mut own = vec![];
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(text) = texts.get(i) else { return own };
                    own.push((i, self.compile(text)));
                }
            };
            let handles: Vec<_> = (0..threads).map(|_| s.spawn(work)).collect();
            handles.into_iter().flat_map(|h| h.join().expect("compiling does not panic")).collect()
        });
        made.sort_by_key(|m| m.0);
        made.into_iter().map(|m| m.1).collect()
    }

    /// The cubin of a source, from the cache or compiled now.
    pub fn compile(&self, text: &str) -> Result<Vec<u8>, Error> {
        let key = format!("{:?} {} {OPTIONS:?} {text}", self.version, self.arch.name());
        let file = self.cache.join(format!("{:016x}-{}.cubin", hash(&key), self.arch.name()));
        if let Some(cubin) = read(&file) {
            return Ok(cubin);
        }
        let cubin = self.nvrtc(text)?;
        write(&file, &cubin); // a cache that cannot be written costs time, not correctness
        Ok(cubin)
    }

    fn nvrtc(&self, text: &str) -> Result<Vec<u8>, Error> {
        let wrong = |what: &str, e: result::NvrtcError| Error::Cuda(format!("{what}: {e:?}"));
        let source = CString::new(text).map_err(|_| Error::Cuda("a kernel's source holds a zero byte".into()))?;
        let program = result::create_program(&source, Some(c"kernel.cu")).map_err(|e| wrong("NVRTC", e))?;
        let mut options: Vec<String> = OPTIONS.iter().map(|o| o.to_string()).collect();
        options.push(format!("--gpu-architecture={}", self.arch.name()));
        // SAFETY: the program is alive until destroyed below; the buffer is as large as NVRTC says.
        unsafe {
            let compiled = result::compile_program(program, &options);
            if compiled.is_err() {
                let log = result::get_program_log(program).unwrap_or_default();
                let log = CStr::from_ptr(log.as_ptr()).to_string_lossy().to_string();
                let _ = result::destroy_program(program);
                return Err(Error::Cuda(format!("a kernel does not compile for {}:\n{log}", self.arch.name())));
            }
            let mut size = 0;
            sys::nvrtcGetCUBINSize(program, &mut size).result().map_err(|e| wrong("NVRTC", e))?;
            let mut cubin = vec![0u8; size];
            sys::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast()).result().map_err(|e| wrong("NVRTC", e))?;
            let _ = result::destroy_program(program);
            Ok(cubin)
        }
    }
}

/// A cache file is a hash and then the cubin; None if the file was truncated or changed.
fn read(file: &Path) -> Option<Vec<u8>> {
    let bytes = cache::read(file)?;
    let (sum, cubin) = bytes.split_at_checked(8)?;
    (sum == xxh3_64(cubin).to_le_bytes()).then(|| cubin.to_vec())
}

fn write(file: &Path, cubin: &[u8]) {
    cache::replace(file, &[&xxh3_64(cubin).to_le_bytes()[..], cubin].concat());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_is_refused_with_the_way_out() {
        assert!(supported(13, 0).is_ok());
        let e = supported(12, 4).unwrap_err().to_string();
        assert!(e.contains("NVRTC 12.4") && e.contains("pip install"), "{e}");
    }

    #[test]
    fn a_damaged_cache_entry_is_no_entry() {
        let folder = std::env::temp_dir().join(format!("kiln-cubin-{}", std::process::id()));
        let file = folder.join("x.cubin");
        write(&file, b"machine code");
        assert_eq!(read(&file).as_deref(), Some(&b"machine code"[..]));
        let mut bytes = std::fs::read(&file).unwrap();
        bytes[10] ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        assert_eq!(read(&file), None);
        std::fs::write(&file, &bytes[..5]).unwrap();
        assert_eq!(read(&file), None);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing half-written is left");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
