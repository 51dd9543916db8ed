//! A window of steps under Nsight Systems or Nsight Compute, where they are installed.

use crate::report::quoted;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A profiler of NVIDIA's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// Nsight Systems: a timeline.
    Systems,
    /// Nsight Compute: counters of each kernel.
    Compute,
}

impl Tool {
    pub fn name(self) -> &'static str {
        match self {
            Tool::Systems => "nsys",
            Tool::Compute => "ncu",
        }
    }

    fn full_name(self) -> &'static str {
        match self {
            Tool::Systems => "Nsight Systems",
            Tool::Compute => "Nsight Compute",
        }
    }

    /// Options before the program: only the window of steps, each node of a CUDA graph by itself, and the report's place.
    pub fn options(self, report: &str) -> Vec<String> {
        let own: &[&str] = match self {
            Tool::Systems => &[
                "profile",
                "--trace=cuda,nvtx,cublas",
                "--cuda-graph-trace=node",
                "--capture-range=cudaProfilerApi",
                "--capture-range-end=stop",
                "--force-overwrite=true",
            ],
            Tool::Compute => &["--graph-profiling", "node", "--profile-from-start", "off", "--nvtx", "--set", "basic", "--force-overwrite"],
        };
        own.iter().map(|o| o.to_string()).chain(["-o".into(), report.into()]).collect()
    }

    /// What the report's file is called.
    pub fn file(self) -> &'static str {
        match self {
            Tool::Systems => "nsys.nsys-rep",
            Tool::Compute => "ncu.ncu-rep",
        }
    }

    /// How to get it, and what to run by hand.
    pub fn missing(self, command: &[String]) -> String {
        format!(
            "{} is not installed ({} is not in PATH, /usr/local/cuda/bin or /opt/nvidia). It comes with the CUDA toolkit and as a package of NVIDIA's \
             own ({}); it may be installed on another machine, too, for the same command: {} {}",
            self.full_name(),
            self.name(),
            match self {
                Tool::Systems => "developer.nvidia.com/nsight-systems, or apt install nsight-systems-cli from NVIDIA's repository",
                Tool::Compute => "developer.nvidia.com/nsight-compute, or apt install cuda-nsight-compute-13-0 from NVIDIA's repository",
            },
            self.name(),
            command.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
        )
    }

    /// The program, in PATH or where NVIDIA's installers put it.
    pub fn find(self) -> Option<PathBuf> {
        self.find_in(&std::env::var_os("PATH").unwrap_or_default())
    }

    fn find_in(self, path: &OsStr) -> Option<PathBuf> {
        // A relative or empty part is the working directory's, which may be anybody's.
        let absolute = std::env::split_paths(path).filter(|p| engine::mutant!("profilers-of-the-working-directory", p.is_absolute(), true));
        let folders: Vec<PathBuf> = absolute.chain(["/usr/local/cuda/bin".into()]).collect();
        let vendor = Path::new("/opt/nvidia");
        let mut versions: Vec<PathBuf> = children(vendor).into_iter().flat_map(|p| children(&p).into_iter().chain([p])).collect();
        versions.sort();
        let newest = versions.into_iter().rev().flat_map(|p| [p.join("bin"), p]);
        folders.into_iter().chain(newest).map(|f| f.join(self.name())).find(|p| is_program(p))
    }

    /// Runs this program again with `arguments` under the profiler, and waits for it.
    pub fn run(self, tool: &Path, report: &Path, arguments: &[String]) -> Result<(), String> {
        let own = std::env::current_exe().map_err(|e| format!("cannot find this program's file: {e}"))?;
        let mut command = Command::new(tool);
        command.args(self.options(&report.to_string_lossy())).arg(own).args(arguments);
        let ended = command.status().map_err(|e| format!("cannot start {}: {e}", tool.display()))?;
        match ended.success() {
            true => Ok(()),
            false => Err(format!("{} ended with {ended}", tool.display())),
        }
    }
}

fn children(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect()
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_profiler_is_not_taken_from_the_working_directory() {
        let dir = tempfile::tempdir().unwrap();
        // Relative to the working directory of the tests, which stays what it is.
        let here = std::env::current_dir().unwrap();
        let up: PathBuf = here.components().skip(1).map(|_| "..").collect();
        let relative = up.join(dir.path().strip_prefix("/").unwrap());
        let tool = dir.path().join("nsys");
        std::fs::write(&tool, "").unwrap();
        std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(Tool::Systems.find_in(dir.path().as_os_str()), Some(tool), "an absolute folder is looked into");
        assert!(relative.join("nsys").exists());
        for path in [relative.clone().into_os_string(), format!(":{}:.", relative.display()).into(), "".into()] {
            let found = Tool::Systems.find_in(&path);
            assert!(found.is_none_or(|p| p.is_absolute()), "{path:?}");
        }
    }
}
