//! Rows of a parquet file. What reads them takes a file's word for how deep it nests and how much it unpacks to, so it does so in a process of its own.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use minijinja::Value;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::Type;

use super::ChatError;
use super::files::{Columns, Row, Visit};
use crate::apart::wire::{DEEPEST, In, Out, receive, send, too_deep};
use crate::apart::{self, Ended, Limits, Process, ROWS, STACK};
use crate::guarded::guarded;
use crate::input;

/// Of processor time, for what comes at once.
const SECONDS: u64 = 20;
/// Of memory, for pages and their dictionaries.
const MEMORY: u64 = 2 << 30;
/// Bytes of rows that come at once; a row is whole.
const BATCH: usize = 256 << 10;
/// Bytes of a row.
const LONGEST: usize = 512 << 20;

/// How a message of a reader begins.
const ROWS_COME: u8 = 0;
const END: u8 = 1;
const BROKEN: u8 = 2;
const BROKEN_ROW: u8 = 3;
const HEAD: u8 = 4;

/// What a file says of itself before its rows.
#[derive(Debug, Default)]
pub struct Head {
    /// Its columns, and whether each is of pictures: a struct with `bytes`.
    pub columns: Vec<(String, bool)>,
    /// What the package `datasets` notes of them, in JSON; empty where it did not write the file.
    pub noted: String,
}

/// Told what a file says of itself; `Break` ends the reading.
pub type Told<'a> = dyn FnMut(Head) -> ControlFlow<()> + 'a;

/// Bytes of what is noted.
const NOTED: usize = 16 << 20;

/// Every row, with these columns; without them, all. A null is a field that is not there.
pub(super) fn each_row(path: &Path, columns: Option<&Columns>, visit: &mut Visit) -> Result<(), ChatError> {
    read(path, columns, None, visit)
}

/// The same where bytes need not be text, after what the file says of itself.
pub(crate) fn each_picture(path: &Path, columns: Option<&Columns>, told: &mut Told, visit: &mut Visit) -> Result<(), ChatError> {
    read(path, columns, Some(told), visit)
}

fn read(path: &Path, columns: Option<&Columns>, mut told: Option<&mut Told>, visit: &mut Visit) -> Result<(), ChatError> {
    if !apart::possible() {
        return each_row_here(path, columns, told, visit);
    }
    input::open(path).map_err(ChatError::io("open", path))?;
    let broken = |reason: String| ChatError::file(path, reason);
    let mut process = Process::start(ROWS).map_err(|e| broken(format!("no process could be started to read it: {e}")))?;
    let mut asked = Out::default();
    asked.bytes(path.as_os_str().as_bytes());
    asked.number(columns.is_some().into());
    if let Some(columns) = columns {
        [&columns.required, &columns.all].into_iter().for_each(|names| asked.texts(names));
        asked.text(&columns.what);
    }
    asked.number(told.is_some().into());
    let mut sent = send(&process.socket, &asked.0);
    loop {
        let message = match sent.and_then(|()| process.receive()) {
            Ok(message) => message,
            Err(e) => return Err(broken(reason_of_end(process.ended(&e)))),
        };
        sent = Ok(());
        let strange = || broken(reason_of_end(Ended::Other("says what is not understood".into())));
        let mut from = In(message.get(1..).unwrap_or_default());
        match message.first() {
            Some(&END) => return Ok(()),
            Some(&HEAD) => {
                let columns = from.list(|from| Some((from.text()?, from.number()? == 1))).ok_or_else(strange)?;
                let head = Head { columns, noted: from.text().ok_or_else(strange)? };
                if told.as_mut().is_some_and(|told| told(head).is_break()) {
                    return Ok(());
                }
            }
            Some(&BROKEN) => return Err(broken(from.text().ok_or_else(strange)?)),
            Some(&BROKEN_ROW) => {
                let (number, problem) = (from.number().ok_or_else(strange)? as u64, from.text().ok_or_else(strange)?);
                return Err(ChatError::Row { path: path.to_owned(), unit: "row", number, problem });
            }
            Some(&ROWS_COME) => {
                while !from.0.is_empty() {
                    let (number, value) = (from.number().ok_or_else(strange)? as u64, from.value().ok_or_else(strange)?);
                    if visit(Row { path, unit: "row", number, value })?.is_break() {
                        return Ok(());
                    }
                }
            }
            _ => return Err(strange()),
        }
    }
}

fn reason_of_end(ended: Ended) -> String {
    let why = match ended {
        Ended::Time => format!("a part of it takes more than {SECONDS} s of processor time"),
        Ended::Memory => format!("a part of it takes more than {} MiB of memory", MEMORY >> 20),
        Ended::Depth => format!("it is nested deeper than {} MiB of stack reach", STACK >> 20),
        Ended::Panicked => "it is damaged".into(),
        Ended::Idle => "it ends nowhere".into(),
        Ended::Other(how) => format!("the process that reads it {how}"),
    };
    format!("not a readable parquet file: {why} (download it again)")
}

/// Reads: which file and which columns come first.
pub(crate) fn serve(socket: &UnixStream, limits: &mut Limits) {
    limits.allow(SECONDS, MEMORY);
    let Ok(message) = receive(socket) else { return };
    let mut from = In(&message);
    let asked = from.list(|from| from.array::<1>().map(|byte| byte[0])).and_then(|path| {
        let columns = if from.number()? == 1 { Some([from.list(In::text)?, from.list(In::text)?]) } else { None };
        let what = if columns.is_some() { from.text()? } else { String::new() };
        Some((path, columns, what, from.number()? == 1))
    });
    let Some((path, columns, what, pictures)) = asked else { return };
    let path = Path::new(OsStr::from_bytes(&path));
    fn texts(names: &[String]) -> Vec<&str> {
        names.iter().map(String::as_str).collect()
    }
    let columns = columns.as_ref().map(|[required, all]| Columns { required: texts(required), all: texts(all), what: what.clone() });
    let mut batch = Out(vec![ROWS_COME]);
    let mut tell = |head: Head| {
        let mut out = Out(vec![HEAD]);
        out.pairs(&head.columns, |out, is_picture| out.number((*is_picture).into()));
        out.text(&head.noted);
        if send(socket, &out.0).is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let told: Option<&mut Told> = if pictures { Some(&mut tell) } else { None };
    let read = each_row_here(path, columns.as_ref(), told, &mut |row| {
        if too_deep(&row.value) {
            return Err(row.error(format!("is nested deeper than {DEEPEST} levels")));
        }
        batch.number(row.number as usize);
        batch.value(&row.value);
        if batch.0.len() > LONGEST {
            return Err(row.error(format!("has more than {} MiB", LONGEST >> 20)));
        }
        if batch.0.len() < BATCH {
            return Ok(ControlFlow::Continue(()));
        }
        let gone = send(socket, &batch.0).is_err();
        batch.0.truncate(1);
        limits.allow(SECONDS, MEMORY);
        Ok(if gone { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    });
    let last = match read {
        Ok(()) => Out(vec![END]),
        Err(ChatError::Row { number, problem, .. }) => {
            let mut out = Out(vec![BROKEN_ROW]);
            out.number(number as usize);
            out.text(&problem);
            out
        }
        Err(error) => {
            let mut out = Out(vec![BROKEN]);
            // Which file it is, is said there.
            out.text(&if let ChatError::File { reason, .. } = error { reason } else { error.to_string() });
            out
        }
    };
    // Rows before a broken one are whole.
    let _ = send(socket, &batch.0).and_then(|()| send(socket, &last.0));
}

fn each_row_here(path: &Path, columns: Option<&Columns>, told: Option<&mut Told>, visit: &mut Visit) -> Result<(), ChatError> {
    let file = input::open(path).map_err(ChatError::io("open", path))?;
    let broken = |e: &dyn std::fmt::Display| ChatError::file(path, format!("not a readable parquet file: {e} (download it again)"));
    let damaged = || ChatError::file(path, "not a readable parquet file: it is damaged (download it again)");
    let reader = guarded(|| SerializedFileReader::new(file).map_err(|e| broken(&e))).ok_or_else(damaged)??;
    let about = reader.metadata().file_metadata();
    let (schema, any_bytes) = (about.schema(), told.is_some());
    if let Some(told) = told {
        let is_picture = |t: &Type| t.is_group() && t.get_fields().iter().any(|field| field.name() == "bytes");
        let columns = schema.get_fields().iter().map(|t| (t.name().to_owned(), is_picture(t))).collect();
        let noted = about.key_value_metadata().into_iter().flatten().find(|pair| pair.key == "huggingface");
        let noted = noted.and_then(|pair| pair.value.clone()).filter(|text| text.len() <= NOTED).unwrap_or_default();
        if told(Head { columns, noted }).is_break() {
            return Ok(());
        }
    }
    let columns = columns.map(|columns| projected(path, schema, columns)).transpose()?;
    let mut rows = guarded(|| reader.get_row_iter(columns).map_err(|e| broken(&e))).ok_or_else(damaged)??;
    for number in 1.. {
        let at = |problem: String| ChatError::Row { path: path.to_owned(), unit: "row", number, problem };
        let Some(row) = guarded(|| rows.next().transpose().map_err(|e| at(reason(&e.to_string())))).ok_or_else(damaged)?? else {
            break;
        };
        let value = Value::from_pairs(
            row.into_columns()
                .into_iter()
                .filter_map(|(name, field)| match value(field, any_bytes) {
                    Ok(value) => (!value.is_none()).then_some(Ok((name, value))),
                    Err(problem) => Some(Err(at(format!("the column {name:?} holds {problem}")))),
                })
                .collect::<Result<Vec<_>, _>>()?,
        );
        if visit(Row { path, unit: "row", number, value })?.is_break() {
            break;
        }
    }
    Ok(())
}

fn reason(error: &str) -> String {
    match error {
        _ if error.contains("as String") => "a text in it is invalid UTF-8 (write the file again from UTF-8 texts)".into(),
        _ if error.contains("Disabled feature") || error.contains("codec type") => {
            // "Disabled feature at compile time: brotli", "The codec type LZO is not supported yet"
            let words = error.split("compile time: ").last().unwrap_or_default();
            let words = words.split("codec type ").last().unwrap_or_default();
            let codec = words.split(' ').next().unwrap_or_default();
            format!("its columns are compressed with {codec}, which is not read (write it with snappy, gzip, zstd or lz4)")
        }
        _ => format!("{error} (download the file again)"),
    }
}

/// The part of a schema that is read.
fn projected(path: &Path, schema: &Type, wanted: &Columns) -> Result<Type, ChatError> {
    let columns = schema.get_fields();
    let names: Vec<&str> = columns.iter().map(|column| column.name()).collect();
    if let Some(missing) = wanted.required.iter().find(|name| !names.contains(name)) {
        return Err(ChatError::file(path, format!("no column {missing:?}, only {names:?} (expected {})", wanted.what)));
    }
    let kept: Vec<Arc<Type>> = columns.iter().filter(|column| wanted.all.contains(&column.name())).cloned().collect();
    Type::group_type_builder(schema.name())
        .with_fields(kept)
        .build()
        .map_err(|e| ChatError::file(path, format!("not a readable parquet file: {e} (download it again)")))
}

fn value(field: Field, any_bytes: bool) -> Result<Value, String> {
    Ok(match field {
        Field::Null => Value::from(()),
        Field::Bool(x) => x.into(),
        Field::Byte(x) => x.into(),
        Field::Short(x) => x.into(),
        Field::Int(x) => x.into(),
        Field::Long(x) => x.into(),
        Field::UByte(x) => x.into(),
        Field::UShort(x) => x.into(),
        Field::UInt(x) => x.into(),
        Field::ULong(x) => x.into(),
        Field::Float16(x) => x.to_f32().into(),
        Field::Float(x) => x.into(),
        Field::Double(x) => x.into(),
        Field::Str(text) => text.into(),
        Field::Bytes(bytes) if any_bytes => Value::from_bytes(bytes.data().to_vec()),
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => text.into(),
            Err(e) => return Err(format!("bytes that are invalid UTF-8 at {}", e.valid_up_to())),
        },
        Field::Group(row) => {
            let mut pairs = vec![];
            for (name, field) in row.into_columns() {
                pairs.extend(Some((name, value(field, any_bytes)?)).filter(|(_, value)| !value.is_none()));
            }
            Value::from_pairs(pairs)
        }
        Field::ListInternal(list) => {
            Value::from_iter(list.elements().iter().map(|field| value(field.clone(), any_bytes)).collect::<Result<Vec<_>, _>>()?)
        }
        Field::MapInternal(map) => {
            let pairs =
                map.entries().iter().map(|(key, field)| Ok((value(key.clone(), any_bytes)?.to_string(), value(field.clone(), any_bytes)?)));
            Value::from_pairs(pairs.collect::<Result<Vec<_>, String>>()?)
        }
        other => other.to_string().into(),
    })
}
