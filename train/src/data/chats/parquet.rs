//! Rows of a parquet file.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use minijinja::Value;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::Type;

use super::ChatError;
use super::files::{Columns, Row, Visit};
use crate::input;

/// Every row, with these columns; without them, all. A null is a field that is not there.
pub(super) fn each_row(path: &Path, columns: Option<&Columns>, visit: &mut Visit) -> Result<(), ChatError> {
    let file = input::open(path).map_err(ChatError::io("open", path))?;
    let broken = |e: &dyn std::fmt::Display| ChatError::file(path, format!("not a readable parquet file: {e} (download it again)"));
    let reader = guarded(path, || SerializedFileReader::new(file).map_err(|e| broken(&e)))?;
    let schema = reader.metadata().file_metadata().schema();
    let columns = columns.map(|columns| projected(path, schema, columns)).transpose()?;
    let mut rows = guarded(path, || reader.get_row_iter(columns).map_err(|e| broken(&e)))?;
    for number in 1.. {
        let at = |problem: String| ChatError::Row { path: path.to_owned(), unit: "row", number, problem };
        let Some(row) = guarded(path, || rows.next().transpose().map_err(|e| at(reason(&e.to_string()))))? else { break };
        let value = Value::from_pairs(
            row.into_columns()
                .into_iter()
                .filter_map(|(name, field)| match value(field) {
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

/// The crate panics at some files that are damaged.
fn guarded<T>(path: &Path, read: impl FnOnce() -> Result<T, ChatError>) -> Result<T, ChatError> {
    catch_unwind(AssertUnwindSafe(read))
        .unwrap_or_else(|_| Err(ChatError::file(path, "not a readable parquet file: it is damaged (download it again)")))
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

fn value(field: Field) -> Result<Value, String> {
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
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => text.into(),
            Err(e) => return Err(format!("bytes that are invalid UTF-8 at {}", e.valid_up_to())),
        },
        Field::Group(row) => {
            let mut pairs = vec![];
            for (name, field) in row.into_columns() {
                pairs.extend(Some((name, value(field)?)).filter(|(_, value)| !value.is_none()));
            }
            Value::from_pairs(pairs)
        }
        Field::ListInternal(list) => {
            Value::from_iter(list.elements().iter().map(|field| value(field.clone())).collect::<Result<Vec<_>, _>>()?)
        }
        Field::MapInternal(map) => {
            let pairs = map.entries().iter().map(|(key, field)| Ok((value(key.clone())?.to_string(), value(field.clone())?)));
            Value::from_pairs(pairs.collect::<Result<Vec<_>, String>>()?)
        }
        other => other.to_string().into(),
    })
}
