//! How much memory may be taken: what the GPU has free; or what Linux could give without swapping, and the control groups around this process (a
//! container's, a Slurm job's) and its own limit (`ulimit -v`) still allow.

use crate::report::human_bytes;
use engine::cuda::Usage;
use engine::{Device, Ranks};
use rustix::process::{Resource, getrlimit};
use std::fs;
use std::path::{Path, PathBuf};

/// The bytes that a text such as `8GiB`, `8000MB`, `1.5g` or `512m` stands for: KB, MB, GB and TB are powers of 1000; KiB, MiB, GiB, TiB and single
/// letters powers of 1024.
pub fn size(text: &str) -> Result<u64, String> {
    let wants = || format!("'{text}' is not a size such as 8GiB, 8000MB or 8g");
    let text = text.trim();
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(|| format!("{}: name its unit, {text}GiB", wants()))?;
    let (number, unit) = text.split_at(at);
    let number: f64 = number.parse().map_err(|_| wants())?;
    let unit = unit.trim_start().to_ascii_lowercase();
    let power = 1 + unit.chars().next().and_then(|first| "kmgt".find(first)).ok_or_else(wants)? as i32;
    let base: f64 = match &unit[1..] {
        "" | "ib" => 1024.0,
        "b" => 1000.0,
        _ => return Err(wants()),
    };
    match number * base.powi(power) {
        bytes if bytes < 1.0 => Err(format!("'{text}' is no memory at all: name a size such as 8GiB")),
        bytes if bytes > (1u64 << 53) as f64 => Err(format!("'{text}' is more than any machine has: name a size such as 8GiB")),
        bytes => Ok(bytes as u64),
    }
}

/// What ranks may take that must decide alike: the least that is available to one of them.
pub fn available_to_all(device: &Device, ranks: &Ranks) -> Result<Option<u64>, engine::Error> {
    let own = available(device);
    if ranks.size() == 1 {
        return Ok(own);
    }
    let told = ranks.gather(&own.unwrap_or(u64::MAX).to_le_bytes())?;
    Ok(least(&told))
}

/// Of what ranks told each other; the largest number stands for what is not known.
fn least(told: &[Vec<u8>]) -> Option<u64> {
    let all = told.iter().filter_map(|bytes| Some(u64::from_le_bytes(bytes.as_slice().try_into().ok()?)));
    engine::mutant!("the-most-memory-of-a-rank", all.min(), all.max()).filter(|free| *free < u64::MAX)
}

/// None where it is not known.
pub fn available(device: &Device) -> Option<u64> {
    if let Device::Cuda(cuda, _) = device {
        return Some(cuda.memory().1 as u64);
    }
    host()
}

/// The same of the machine's memory, for this process.
pub fn host() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| of_machine(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| of_groups(&text, Path::new("/sys/fs/cgroup")));
    let limit = getrlimit(Resource::As).current.zip(fs::read_to_string("/proc/self/statm").ok());
    let process = limit.and_then(|(limit, statm)| of_process(limit, &statm, rustix::param::page_size() as u64));
    machine.into_iter().chain(groups).chain(process).min()
}

/// What this process took at most, as it was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Measured {
    /// Of a GPU's memory.
    Device(Usage),
    /// Of the machine's memory: the largest resident set, as Linux counts it; None where the system does not tell.
    Resident(Option<u64>),
}

impl Measured {
    pub fn of(device: &Device) -> Measured {
        device.usage().map_or_else(|| Measured::Resident(peak_resident()), Measured::Device)
    }

    /// `46.6 GiB on the device (46.1 GiB allocated by kiln)`
    pub fn line(&self) -> String {
        let bytes = |b: usize| human_bytes(b as u64);
        match self {
            Measured::Device(u) => format!("{} on the device ({} allocated by kiln)", bytes(u.reserved_peak), bytes(u.allocated_peak)),
            Measured::Resident(Some(resident)) => format!("{} resident", human_bytes(*resident)),
            Measured::Resident(None) => "nothing: this system does not tell".into(),
        }
    }

    /// For a line of metrics; nothing on the CPU, where the resident set has more than the run in it.
    pub fn metrics(&self) -> Vec<(String, f64)> {
        let Measured::Device(u) = self else { return vec![] };
        let all = [("allocated", u.allocated), ("reserved", u.reserved), ("peak", u.reserved_peak)];
        all.map(|(name, bytes)| (format!("device_{name}_bytes"), bytes as f64)).into()
    }

    /// For JSON: each figure, and null for what was not measured.
    pub fn json(&self) -> serde_json::Value {
        match self {
            Measured::Device(u) => serde_json::json!({
                "measured_bytes": u.reserved_peak, "resident_bytes": peak_resident(), "device_allocated_bytes": u.allocated,
                "device_allocated_peak_bytes": u.allocated_peak, "device_reserved_bytes": u.reserved,
            }),
            Measured::Resident(resident) => serde_json::json!({ "measured_bytes": null, "resident_bytes": resident }),
        }
    }
}

/// The most memory that this process has had, as Linux counts it.
fn peak_resident() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let kib: u64 = text.lines().find(|l| l.starts_with("VmHWM"))?.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// From the limit of the address space and the text of /proc/self/statm, which begins with the pages that are taken of it.
fn of_process(limit: u64, statm: &str, page: u64) -> Option<u64> {
    let pages: u64 = statm.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(pages.saturating_mul(page)))
}

/// From the text of /proc/meminfo.
fn of_machine(meminfo: &str) -> Option<u64> {
    let kib: u64 = meminfo.lines().find(|l| l.starts_with("MemAvailable:"))?.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// Names of the files of a version: the limit, what is used, and in `memory.stat` the files' pages among that, which are given back when memory is short.
struct Version {
    limit: &'static str,
    used: &'static str,
    cached: [&'static str; 2],
}

const V1: Version =
    Version { limit: "memory.limit_in_bytes", used: "memory.usage_in_bytes", cached: ["total_inactive_file", "total_active_file"] };
const V2: Version = Version { limit: "memory.max", used: "memory.current", cached: ["inactive_file", "active_file"] };

/// From the text of /proc/self/cgroup and the folder where control groups are mounted: the least that any of the groups around this process has
/// left. Version 1 has a line and a folder for each controller, version 2 one for all.
fn of_groups(cgroup: &str, mounted: &Path) -> Option<u64> {
    let mut least = None;
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (version, roots) = match controllers {
            "" => (V2, vec![mounted.to_path_buf(), mounted.join("unified")]),
            some if some.split(',').any(|c| c == "memory") => (V1, vec![mounted.join("memory"), mounted.join(some)]),
            _ => continue,
        };
        for root in roots {
            // Inside a container the path may be the host's, and the container's own group is the mounted folder itself.
            let below = Path::new(path.trim_start_matches('/'));
            let groups = below.ancestors().map(|group| root.join(group));
            least = least.into_iter().chain(groups.filter_map(|group| left(&group, &version))).min();
        }
    }
    least
}

/// What a group may still take; none where it has no limit.
fn left(group: &Path, v: &Version) -> Option<u64> {
    let number = |file: &str| -> Option<u64> { read(group.join(file))?.trim().parse().ok() };
    // "max" is no number. Version 1 writes a number near 2^63 instead, which is more than any machine has.
    let (limit, used) = (number(v.limit)?, number(v.used)?);
    let stat = read(group.join("memory.stat")).unwrap_or_default();
    let of_stat = |name: &&str| -> u64 {
        let line = stat.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
    };
    let cached: u64 = v.cached.iter().map(of_stat).fold(0, u64::saturating_add);
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

fn read(path: PathBuf) -> Option<String> {
    fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of control groups: folders, and what their files say.
    fn tree(groups: &[(&str, &[(&str, &str)])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (group, files) in groups {
            fs::create_dir_all(dir.path().join(group)).unwrap();
            for (name, text) in *files {
                fs::write(dir.path().join(group).join(name), text).unwrap();
            }
        }
        dir
    }

    #[test]
    fn sizes_are_read_with_their_units() {
        let gib = 1u64 << 30;
        for (text, bytes) in
            [("8GiB", 8 * gib), ("8g", 8 * gib), ("1.5 G", gib + gib / 2), ("8000MB", 8_000_000_000), ("2tb", 2_000_000_000_000)]
        {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        assert_eq!((size("512m"), size("3KiB"), size(".5k")), (Ok(512 << 20), Ok(3072), Ok(512)));
        for (bad, why) in [
            ("", "not a size"),
            ("8GB!", "not a size"),
            ("-8GiB", "not a size"),
            ("1.2.3g", "not a size"),
            ("GiB", "not a size"),
            ("8iB", "not a size"),
            ("8b", "not a size"),
            ("8Gi", "not a size"),
            ("8\u{e9}", "not a size"),
            ("1e3g", "not a size"),
            ("8", "name its unit, 8GiB"),
            ("0GiB", "no memory at all"),
            ("99999999TiB", "more than any machine has"),
        ] {
            let said = size(bad).unwrap_err();
            assert!(said.contains(why), "{bad}: {said}");
        }
    }

    #[test]
    fn a_gpus_bytes_are_told_apart_from_the_resident_set() {
        let usage = Usage { allocated: 1 << 30, allocated_peak: 2 << 30, reserved: 3 << 30, reserved_peak: 4 << 30 };
        let device = Measured::Device(usage);
        assert_eq!(device.line(), "4.00 GiB on the device (2.00 GiB allocated by kiln)");
        let metrics = device.metrics();
        let names: Vec<(&str, f64)> = metrics.iter().map(|(n, v)| (n.as_str(), *v / f64::from(1 << 30))).collect();
        assert_eq!(names, [("device_allocated_bytes", 1.0), ("device_reserved_bytes", 3.0), ("device_peak_bytes", 4.0)]);
        assert_eq!(device.json()["measured_bytes"], 4u64 << 30);
        let cpu = Measured::of(&Device::cpu(engine::Cpu::new(1)));
        assert!(cpu.line().ends_with(" resident") && cpu.metrics().is_empty() && cpu.json()["measured_bytes"].is_null(), "{}", cpu.line());
    }

    #[test]
    fn the_least_that_a_rank_has_counts() {
        let told = |all: &[u64]| least(&all.iter().map(|free| free.to_le_bytes().to_vec()).collect::<Vec<_>>());
        assert_eq!((told(&[30, 10, 20]), told(&[u64::MAX, 10]), told(&[10, u64::MAX])), (Some(10), Some(10), Some(10)));
        assert_eq!((told(&[u64::MAX, u64::MAX]), told(&[])), (None, None));
    }

    #[test]
    fn the_machine_says_what_it_could_give() {
        assert_eq!(of_machine("MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:   70 kB\n"), Some(70 * 1024));
        for bad in ["", "MemAvailable:", "MemAvailable: many kB", "MemAvailable: 18446744073709551615 kB"] {
            assert_eq!(of_machine(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_is_taken_counts_against_the_processs_own_limit() {
        assert_eq!(of_process(100_000, "10 7 3 1 0 5 0\n", 4096), Some(100_000 - 40_960));
        assert_eq!(of_process(100_000, "30 7\n", 4096), Some(0));
        assert_eq!(of_process(100_000, "", 4096), None);
    }

    #[test]
    fn the_tightest_group_of_version_2_counts() {
        let dir = tree(&[
            ("", &[("memory.stat", "")]),
            (
                "job",
                &[
                    ("memory.max", "1000\n"),
                    ("memory.current", "900\n"),
                    ("memory.stat", "anon 1\nfile 999\ninactive_file 200\nactive_file 50\n"),
                ],
            ),
            ("job/step", &[("memory.max", "max\n"), ("memory.current", "10\n")]),
            ("job/step/task", &[("memory.max", "5000\n"), ("memory.current", "100\n")]),
        ]);
        let of = |text: &str| of_groups(text, dir.path());
        assert_eq!(of("0::/job/step/task\n"), Some(350), "1000 less 900, of which 250 are files' pages");
        assert_eq!(of("0::/job/step\n"), Some(350));
        assert_eq!(of("0::/elsewhere\n"), None);
        assert_eq!(of("garbage\n0:cpu\n"), None);
    }

    #[test]
    fn version_1_has_a_folder_for_each_controller() {
        let files = |limit, used| {
            [("memory.limit_in_bytes", limit), ("memory.usage_in_bytes", used), ("memory.stat", "cache 7\ntotal_inactive_file 30\n")]
        };
        let dir = tree(&[("memory/docker/one", &files("1000", "400")), ("memory/docker", &files("9223372036854771712", "800"))]);
        let of = |text: &str| of_groups(text, dir.path());
        assert_eq!(of("5:cpu,cpuacct:/docker/one\n4:memory:/docker/one\n0::/docker/one\n"), Some(630));
        assert_eq!(of("4:memory:/docker\n"), Some(9223372036854771712 - 770));
        assert_eq!(of("5:cpu:/docker/one\n"), None);
        // Seen from inside: the path is the host's, the group is what is mounted.
        let inside = tree(&[("memory", &files("500", "600"))]);
        assert_eq!(of_groups("4:memory:/docker/one\n", inside.path()), Some(0), "more used than allowed is nothing left");
    }
}
