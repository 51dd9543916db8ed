//! What a run measured, twice: `metrics.jsonl`, one object a line, for programs; a TensorBoard event file for looking.
//!
//! The event file is a sequence of TFRecords, each one protobuf message `tensorflow.Event`. Of that schema five fields
//! are needed, so they are encoded here by hand.

use crate::files;
use rustix::fs::OFlags;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    #[error("cannot {action} {}: {cause}", .path.display())]
    Io { action: &'static str, path: PathBuf, cause: io::Error },
    #[error("a metric cannot be called {0:?}: every record has that field already")]
    Reserved(String),
}

/// Appends to `metrics.jsonl` and writes one event file. Nothing is buffered here, so a killed process loses no record.
#[derive(Debug)]
pub struct Metrics {
    lines: Output,
    events: Output,
}

#[derive(Debug)]
struct Output {
    file: File,
    path: PathBuf,
}

impl Metrics {
    pub fn open(dir: &Path) -> Result<Self, MetricsError> {
        fs::create_dir_all(dir).map_err(io_error("create", dir))?;
        let path = dir.join("metrics.jsonl");
        let file = open_lines(&path).map_err(io_error("open", &path))?;
        let lines = Output { file, path };
        let mut events = create_events(dir)?;
        events.write(&version_event(now()))?;
        // Their names; `flush` sees to what they hold.
        engine::mutant!("names-of-records-are-not-synced", files::sync_folder(dir), Ok(())).map_err(io_error("sync", dir))?;
        Ok(Self { lines, events })
    }

    /// Everything that a step has to say, in one record; names of validation figures begin with `val_`. A number that is not
    /// finite is null in the JSON, and itself in TensorBoard.
    pub fn record(&mut self, step: u64, values: &[(&str, f64)]) -> Result<(), MetricsError> {
        self.lines.write(json_line(step, values)?.as_bytes())?;
        self.events.write(&scalar_event(now(), step, values))
    }

    /// Waits until what was recorded is on the disk: a record survives a kill without it, a power cut only with it.
    pub fn flush(&mut self) -> Result<(), MetricsError> {
        let synced = |o: &Output| engine::mutant!("records-are-not-synced", files::sync(&o.file, &o.path), Ok(()));
        [&self.lines, &self.events].into_iter().try_for_each(|o| synced(o).map_err(io_error("sync", &o.path)))
    }
}

impl Output {
    /// In one system call, so that records are not torn.
    fn write(&mut self, bytes: &[u8]) -> Result<(), MetricsError> {
        let written = self.file.write_all(bytes);
        written.map_err(io_error("write", &self.path))
    }
}

/// What a `metrics.jsonl` holds.
#[derive(Debug)]
pub struct Records {
    /// By step. A run that was resumed repeats steps: the last record of a step counts.
    pub all: Vec<Map<String, Value>>,
    path: PathBuf,
    /// Lines that are no record, counted from 1. A last line that was cut is none of them.
    damaged: Vec<usize>,
}

impl Records {
    /// `runs/a/metrics.jsonl: 2 damaged lines skipped, the first is line 7`
    pub fn damage(&self) -> Option<String> {
        let first = self.damaged.first()?;
        let lines = if self.damaged.len() == 1 { "line" } else { "lines" };
        Some(format!("{}: {} damaged {lines} skipped, the first is line {first}", self.path.display(), self.damaged.len()))
    }
}

/// Power cuts leave zeros and halves of lines: they are skipped, and counted.
pub fn read(path: &Path) -> Result<Records, MetricsError> {
    let text = crate::input::read(path).map_err(io_error("read", path))?;
    let (mut records, mut damaged) = (BTreeMap::new(), vec![]);
    for (number, line) in text.split_inclusive(|b| *b == b'\n').enumerate() {
        let record = serde_json::from_slice::<Map<String, Value>>(line).ok();
        match record.and_then(|r| Some((r.get("step")?.as_u64()?, r))) {
            Some((step, record)) => drop(records.insert(step, record)),
            None if line.trim_ascii().is_empty() || !line.ends_with(b"\n") => {}
            None => damaged.push(number + 1),
        }
    }
    Ok(Records { all: records.into_values().collect(), path: path.to_path_buf(), damaged })
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MetricsError {
    let path = path.to_path_buf();
    move |cause| MetricsError::Io { action, path, cause }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

// ---- metrics.jsonl

/// Opens for appending. A last line without its end was cut by a kill and is taken away, unless it is whole.
fn open_lines(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    // To read and write, a pipe opens at once and is then read for ever.
    options.custom_flags(OFlags::NOFOLLOW.bits() as i32);
    let mut file = options.read(true).append(true).create(true).open(path)?;
    crate::input::regular(&file.metadata()?)?;
    let len = file.metadata()?.len();
    let mut tail = Vec::new();
    let mut window = 4096;
    loop {
        let start = len.saturating_sub(window);
        file.seek(SeekFrom::Start(start))?;
        tail.clear();
        file.read_to_end(&mut tail)?;
        if start == 0 || tail.contains(&b'\n') {
            break;
        }
        window *= 2;
    }
    let newline = tail.iter().rposition(|b| *b == b'\n');
    let last = &tail[newline.map_or(0, |n| n + 1)..];
    if serde_json::from_slice::<Map<String, Value>>(last).is_ok() {
        file.write_all(b"\n")?;
    } else if !last.is_empty() {
        file.set_len(len - last.len() as u64)?;
    }
    Ok(file)
}

fn json_line(step: u64, values: &[(&str, f64)]) -> Result<String, MetricsError> {
    // Written field by field: a Map would not keep the order.
    let mut line = format!("{{\"step\":{step}");
    for (name, value) in values {
        if *name == "step" {
            return Err(MetricsError::Reserved(name.to_string()));
        }
        // Value::from turns what is not finite into null.
        line += &format!(",{}:{}", Value::from(*name), Value::from(*value));
    }
    line += "}\n";
    Ok(line)
}

// ---- TensorBoard

/// What this machine is called.
pub fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "localhost".into(),
        name => name.into(),
    }
}

/// `events.out.tfevents.TIME.HOST.PID.N`; N tells apart those that one process opens within a second.
fn create_events(dir: &Path) -> Result<Output, MetricsError> {
    let (time, pid, host) = (now().as_secs(), std::process::id(), host_name());
    let mut n = 0;
    loop {
        let path = dir.join(format!("events.out.tfevents.{time:010}.{host}.{pid}.{n}"));
        match File::create_new(&path) {
            Ok(file) => return Ok(Output { file, path }),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => n += 1,
            Err(e) => return Err(io_error("create", &path)(e)),
        }
    }
}

// message Event   { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }
// message Summary { message Value { string tag = 1; float simple_value = 2; }  repeated Value value = 1; }

fn version_event(time: Duration) -> Vec<u8> {
    let mut event = Vec::new();
    put_double(&mut event, 1, time.as_secs_f64());
    put_bytes(&mut event, 3, b"brain.Event:2");
    framed(&event)
}

fn scalar_event(time: Duration, step: u64, values: &[(&str, f64)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (name, value) in values {
        let mut scalar = Vec::new();
        let tag = name.strip_prefix("val_").map_or_else(
            || format!("train/{name}"),
            |name| format!("{}/{name}", engine::mutant!("validation-is-drawn-as-training", "val", "train")),
        );
        put_bytes(&mut scalar, 1, tag.as_bytes());
        put_float(&mut scalar, 2, *value as f32);
        put_bytes(&mut summary, 1, &scalar);
    }
    let mut event = Vec::new();
    put_double(&mut event, 1, time.as_secs_f64());
    put_key(&mut event, 2, 0);
    put_varint(&mut event, step);
    put_bytes(&mut event, 5, &summary);
    framed(&event)
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Wire types: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes.
fn put_key(out: &mut Vec<u8>, field: u64, wire_type: u64) {
    put_varint(out, field << 3 | wire_type);
}

fn put_double(out: &mut Vec<u8>, field: u64, value: f64) {
    put_key(out, field, 1);
    out.extend(value.to_le_bytes());
}

fn put_float(out: &mut Vec<u8>, field: u64, value: f32) {
    put_key(out, field, 5);
    out.extend(value.to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_key(out, field, 2);
    put_varint(out, bytes.len() as u64);
    out.extend(bytes);
}

/// A TFRecord: length, its checksum, data, its checksum.
fn framed(data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend(len);
    record.extend(masked_crc(&len).to_le_bytes());
    record.extend(data);
    record.extend(masked_crc(data).to_le_bytes());
    record
}

fn masked_crc(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), bit by bit: a few hundred bytes a record need no table.
fn crc32c(data: &[u8]) -> u32 {
    let mut crc = !0;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(dir: &Path) -> String {
        fs::read_to_string(dir.join("metrics.jsonl")).unwrap()
    }

    #[test]
    fn records_lines() {
        let dir = tempfile::tempdir().unwrap();
        let mut metrics = Metrics::open(dir.path()).unwrap();
        metrics.record(1, &[("loss", 2.5), ("a \"b\"", 1e-7)]).unwrap();
        metrics.record(2, &[("loss", f64::NAN), ("x", f64::INFINITY)]).unwrap();
        metrics.flush().unwrap();
        assert_eq!(
            text(dir.path()),
            "{\"step\":1,\"loss\":2.5,\"a \\\"b\\\"\":1e-7}\n\
             {\"step\":2,\"loss\":null,\"x\":null}\n"
        );
        let e = metrics.record(3, &[("step", 1.0)]).unwrap_err();
        assert!(matches!(e, MetricsError::Reserved(_)));
        assert_eq!(text(dir.path()).lines().count(), 2);
    }

    #[test]
    fn records_are_on_the_disk_when_they_are_said_to_be() {
        use crate::files::noted::{Call::Synced, during};
        let dir = tempfile::tempdir().unwrap();
        let (mut metrics, calls) = during(|| Metrics::open(dir.path()).unwrap());
        assert!(calls.contains(&Synced(dir.path().into())), "their names: {calls:?}");
        metrics.record(1, &[("loss", 2.5)]).unwrap();
        let (_, calls) = during(|| metrics.flush().unwrap());
        let mut files: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| Synced(e.unwrap().path())).collect();
        files.sort_by_key(|f| !format!("{f:?}").contains("metrics.jsonl"));
        assert!(files.len() == 2 && calls == files, "{calls:?}");
    }

    #[test]
    fn resumed_runs_repeat_steps() {
        let dir = tempfile::tempdir().unwrap();
        for (first, loss) in [(1, 5.0), (3, 4.0)] {
            let mut metrics = Metrics::open(dir.path()).unwrap();
            for step in first..first + 4 {
                metrics.record(step, &[("loss", loss)]).unwrap();
            }
        }
        let records = read(&dir.path().join("metrics.jsonl")).unwrap().all;
        let seen: Vec<_> = records.iter().map(|r| (r["step"].as_u64().unwrap(), r["loss"].as_f64().unwrap())).collect();
        assert_eq!(seen, [(1, 5.0), (2, 5.0), (3, 4.0), (4, 4.0), (5, 4.0), (6, 4.0)]);
    }

    #[test]
    fn a_cut_line_is_taken_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let line = |step: u64| format!("{{\"step\":{step},\"loss\":1.0}}");
        let long = format!("{{\"step\":1,\"note\":\"{}", "x".repeat(10_000));
        for (before, kept) in [
            (String::new(), String::new()),
            (line(1), line(1) + "\n"),
            (line(1) + "\n", line(1) + "\n"),
            (line(1) + "\n{\"step\":2,\"ki", line(1) + "\n"),
            (line(1) + "\n" + &long, line(1) + "\n"),
            (long.clone(), String::new()),
        ] {
            fs::write(&path, &before).unwrap();
            let whole = usize::from(!kept.is_empty());
            let read = read(&path).unwrap();
            assert_eq!((read.all.len(), read.damage()), (whole, None));
            let mut metrics = Metrics::open(dir.path()).unwrap();
            metrics.record(7, &[("loss", 1.0)]).unwrap();
            assert_eq!(text(dir.path()), kept + &line(7) + "\n");
        }
    }

    #[test]
    fn damaged_lines_are_skipped_and_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let text = b"\n{\"step\":1}\n{\"step\":\n{\"step\":2}\n\0\0\0\0{\"step\":3}\n{\"loss\":1}\n[3]\n\xff\n{\"step\":4}\n{\"step\":5";
        fs::write(&path, text).unwrap();
        let found = read(&path).unwrap();
        let steps: Vec<_> = found.all.iter().map(|r| r["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, [1, 2, 4]);
        assert_eq!(found.damage().unwrap(), format!("{}: 5 damaged lines skipped, the first is line 3", path.display()));
    }

    /// The bytes that the tensorboard package writes for the same two events.
    #[test]
    fn events() {
        let hex = |bytes: Vec<u8>| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let time = Duration::from_millis(1500);
        assert_eq!(hex(version_event(time)), "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c");
        let values = [("loss", 2.5), ("lr", 0.0)];
        assert_eq!(
            hex(scalar_event(time, 300, &values)),
            "3200000000000000241956ec09000000000000f83f10ac022a240a110a0a747261696e2f6c6f7373\
             15000020400a0f0a08747261696e2f6c7215000000007eb0c3ef"
        );
    }

    #[test]
    fn validation_has_a_place_of_its_own_in_tensorboard() {
        let event = scalar_event(Duration::ZERO, 1, &[("loss", 1.0), ("val_loss", 2.0)]);
        // Field 1, its length, the tag; field 2, a float.
        let tagged = |tag: &str, value: f32| [&[0x0a, tag.len() as u8], tag.as_bytes(), &[0x15], &value.to_le_bytes()].concat();
        for (tag, value) in [("train/loss", 1.0), ("val/loss", 2.0)] {
            let tagged = tagged(tag, value);
            assert!(event.windows(tagged.len()).any(|part| part == tagged), "{tag}: {event:02x?}");
        }
    }

    /// RFC 3720, B.4.
    #[test]
    fn crc() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }
}
