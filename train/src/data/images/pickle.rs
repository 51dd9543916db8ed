//! The pickles of `cifar-10-batches-py`, as Python 2 wrote them once and for all: protocol 2, a dictionary of texts, numbers, lists of those, and one array
//! of bytes. Nothing is executed: an instruction builds one of these values or is refused, the only names that a file may call are the three that a numpy
//! array is written with, and they are recognized, not called.

use std::ops::Range;

/// Values that may wait, entries of a list and of the memo: a batch has 10,000 pictures.
const MOST: usize = 1 << 17;

/// What a file may name, as "module name".
const NAMES: [(&str, Name); 3] =
    [("numpy.core.multiarray _reconstruct", Name::Reconstruct), ("numpy ndarray", Name::Array), ("numpy dtype", Name::Type)];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Name {
    Reconstruct,
    Array,
    Type,
}

/// Nothing is deeper than a dictionary of lists, or a tuple of tuples of numbers.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    None,
    False,
    Number(i64),
    /// Where its bytes are.
    Text(Range<usize>),
    Name(Name),
    List(Vec<Entry>),
    Tuple(Vec<Value>),
    Dict(Vec<(Range<usize>, Value)>),
    /// An array or its type, before it is told what it is.
    Blank(Name),
    /// Of bytes without a sign.
    Bytes,
    Array([usize; 2], Range<usize>),
}

#[derive(Clone, Debug, PartialEq)]
enum Entry {
    Number(i64),
    Text(Range<usize>),
}

/// A dictionary that was read; its texts are parts of the file.
pub struct Dict<'a> {
    bytes: &'a [u8],
    entries: Vec<(Range<usize>, Value)>,
}

impl<'a> Dict<'a> {
    /// Reads all of a file; an error says what of it is not as it should be, and where.
    pub fn read(bytes: &'a [u8]) -> Result<Dict<'a>, String> {
        let mut machine = Machine { bytes, at: 0, stack: vec![], marks: vec![], memo: vec![] };
        let entries = machine.run().map_err(|what| format!("{what}, at byte {}", machine.at))?;
        Ok(Dict { bytes, entries })
    }

    fn get(&self, key: &str) -> Result<&Value, String> {
        let found = self.entries.iter().find(|(name, _)| &self.bytes[name.clone()] == key.as_bytes());
        found.map(|(_, value)| value).ok_or_else(|| format!("it has no {key:?}"))
    }

    /// A list of whole numbers.
    pub fn numbers(&self, key: &str) -> Result<Vec<i64>, String> {
        let number = |e: &Entry| if let Entry::Number(n) = e { Some(*n) } else { None };
        let numbers = if let Value::List(all) = self.get(key)? { all.iter().map(number).collect() } else { None };
        numbers.ok_or_else(|| format!("its {key:?} is no list of whole numbers"))
    }

    /// A list of texts.
    pub fn texts(&self, key: &str) -> Result<Vec<&'a str>, String> {
        let text = |e: &Entry| if let Entry::Text(t) = e { std::str::from_utf8(&self.bytes[t.clone()]).ok() } else { None };
        let texts = if let Value::List(all) = self.get(key)? { all.iter().map(text).collect() } else { None };
        texts.ok_or_else(|| format!("its {key:?} is no list of texts"))
    }

    /// An array of bytes: its shape, and all of it.
    pub fn array(&self, key: &str) -> Result<([usize; 2], &'a [u8]), String> {
        match self.get(key)? {
            Value::Array(shape, at) => Ok((*shape, &self.bytes[at.clone()])),
            _ => Err(format!("its {key:?} is no array of bytes")),
        }
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    stack: Vec<Value>,
    /// How much was on the stack at each mark.
    marks: Vec<usize>,
    /// What may be named again: texts and names.
    memo: Vec<Option<Value>>,
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> Result<Vec<(Range<usize>, Value)>, String> {
        if self.part(2)? != [0x80, 2] {
            return Err("it is no pickle of protocol 2".into());
        }
        loop {
            if self.stack.len() > MOST {
                return Err(format!("more than {MOST} values wait"));
            }
            match self.part(1)?[0] {
                b'}' => self.stack.push(Value::Dict(vec![])),
                b']' => self.stack.push(Value::List(vec![])),
                b'(' if self.marks.len() < 8 => self.marks.push(self.stack.len()),
                b'N' => self.stack.push(Value::None),
                0x89 => self.stack.push(Value::False),
                b'K' => self.number::<1>(|b| b[0].into())?,
                b'M' => self.number(|b| u16::from_le_bytes(b).into())?,
                b'J' => self.number(|b| i32::from_le_bytes(b).into())?,
                b'U' => {
                    let length = self.part(1)?[0].into();
                    self.text(length)?;
                }
                b'T' => {
                    let length = i32::from_le_bytes(self.array()?);
                    self.text(usize::try_from(length).map_err(|_| format!("a text of {length} bytes"))?)?;
                }
                b'c' => self.name()?,
                b'q' => {
                    let index = self.part(1)?[0].into();
                    self.remember(index)?;
                }
                b'r' => {
                    let index = u32::from_le_bytes(self.array()?);
                    self.remember(index as usize)?;
                }
                b'h' => {
                    let index = self.part(1)?[0].into();
                    self.again(index)?;
                }
                b'j' => {
                    let index = u32::from_le_bytes(self.array()?);
                    self.again(index as usize)?;
                }
                op @ 0x85..=0x87 => {
                    let from = self.stack.len().checked_sub(usize::from(op - 0x84));
                    self.tuple(from.ok_or("a tuple of values that are not there")?)?;
                }
                b't' => {
                    let from = self.mark()?;
                    self.tuple(from)?;
                }
                b'R' => self.reduce()?,
                b'b' => self.build()?,
                b'a' => {
                    let from = self.stack.len().checked_sub(1).ok_or("an entry that is not there")?;
                    self.append(from)?;
                }
                b'e' => {
                    let from = self.mark()?;
                    self.append(from)?;
                }
                b's' => {
                    let from = self.stack.len().checked_sub(2).ok_or("an entry that is not there")?;
                    self.set(from)?;
                }
                b'u' => {
                    let from = self.mark()?;
                    self.set(from)?;
                }
                b'.' => break,
                op => return Err(format!("an instruction that these files do not have ({op:#04x}); nothing of a pickle is executed")),
            }
        }
        match (self.stack.pop(), self.stack.is_empty() && self.marks.is_empty(), self.at == self.bytes.len()) {
            (Some(Value::Dict(entries)), true, true) => Ok(entries),
            (.., false) => Err("it goes on after its end".into()),
            _ => Err("it is no dictionary".into()),
        }
    }

    fn part(&mut self, length: usize) -> Result<&'a [u8], String> {
        let bytes: &'a [u8] = self.bytes;
        let part = bytes[self.at..].get(..length).ok_or("it is cut short")?;
        self.at += length;
        Ok(part)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        Ok(self.part(N)?.try_into().expect("as long as was asked for"))
    }

    fn number<const N: usize>(&mut self, read: fn([u8; N]) -> i64) -> Result<(), String> {
        let number = read(self.array()?);
        self.stack.push(Value::Number(number));
        Ok(())
    }

    fn text(&mut self, length: usize) -> Result<(), String> {
        let from = self.at;
        self.part(length)?;
        self.stack.push(Value::Text(from..from + length));
        Ok(())
    }

    /// Two lines: a module, and what of it.
    fn name(&mut self) -> Result<(), String> {
        let rest = &self.bytes[self.at..];
        let found = NAMES.iter().find(|(name, _)| rest.starts_with(format!("{}\n", name.replace(' ', "\n")).as_bytes()));
        let Some((text, name)) = found else {
            let shown = String::from_utf8_lossy(&rest[..rest.len().min(80)]);
            let shown = shown.lines().take(2).collect::<Vec<_>>().join(".");
            return Err(format!("it names {shown:?}, which these files do not; nothing of a pickle is executed"));
        };
        self.at += text.len() + 1;
        self.stack.push(Value::Name(*name));
        Ok(())
    }

    fn remember(&mut self, index: usize) -> Result<(), String> {
        if index > MOST {
            return Err(format!("place {index} of the memo"));
        }
        let value = self.stack.last().ok_or("it remembers nothing")?;
        // Whole lists that are named twice would be a small file that is large in memory.
        let kept = matches!(value, Value::Text(_) | Value::Name(_)).then(|| value.clone());
        self.memo.resize(self.memo.len().max(index + 1), None);
        self.memo[index] = kept;
        Ok(())
    }

    fn again(&mut self, index: usize) -> Result<(), String> {
        let value = self.memo.get(index).cloned().flatten();
        self.stack.push(value.ok_or_else(|| format!("place {index} of the memo is no text and no name"))?);
        Ok(())
    }

    fn mark(&mut self) -> Result<usize, String> {
        self.marks.pop().filter(|from| *from <= self.stack.len()).ok_or("a mark that is not there".into())
    }

    /// The values from there on; none of them belongs to an open mark.
    fn taken(&mut self, from: usize) -> Result<Vec<Value>, String> {
        match self.marks.last().is_none_or(|mark| *mark <= from) && from <= self.stack.len() {
            true => Ok(self.stack.split_off(from)),
            false => Err("values that are not there".into()),
        }
    }

    fn tuple(&mut self, from: usize) -> Result<(), String> {
        let values = self.taken(from)?;
        let is_deep = |v: &Value| match v {
            Value::Tuple(inner) => inner.iter().any(|v| matches!(v, Value::Tuple(_))),
            Value::List(_) | Value::Dict(_) | Value::Array(..) => true,
            _ => false,
        };
        if values.len() > 8 || values.iter().any(is_deep) {
            return Err("a tuple that these files do not have".into());
        }
        self.stack.push(Value::Tuple(values));
        Ok(())
    }

    fn append(&mut self, from: usize) -> Result<(), String> {
        let values = self.taken(from)?;
        let Some(Value::List(list)) = self.stack.last_mut() else { return Err("entries of no list".into()) };
        for value in values {
            list.push(match value {
                Value::Number(n) => Entry::Number(n),
                Value::Text(t) => Entry::Text(t),
                _ => return Err("a list of other things than numbers and texts".into()),
            });
        }
        if list.len() > MOST { Err(format!("a list of more than {MOST}")) } else { Ok(()) }
    }

    fn set(&mut self, from: usize) -> Result<(), String> {
        let values = self.taken(from)?;
        let Some(Value::Dict(entries)) = self.stack.last_mut() else { return Err("entries of no dictionary".into()) };
        let mut values = values.into_iter();
        while let Some(key) = values.next() {
            match (key, values.next()) {
                (Value::Text(key), Some(value)) if !matches!(value, Value::Dict(_)) && entries.len() < 16 => {
                    if entries.iter().any(|(name, _)| self.bytes[name.clone()] == self.bytes[key.clone()]) {
                        return Err(format!("{:?} twice", String::from_utf8_lossy(&self.bytes[key])));
                    }
                    entries.push((key, value));
                }
                _ => return Err("an entry that these files do not have".into()),
            }
        }
        Ok(())
    }

    fn two(&mut self) -> Result<(Value, Value), String> {
        let from = self.stack.len().checked_sub(2).ok_or("values that are not there")?;
        let [a, b] = self.taken(from)?.try_into().expect("two");
        Ok((a, b))
    }

    fn is_text(&self, value: &Value, text: &str) -> bool {
        matches!(value, Value::Text(t) if &self.bytes[t.clone()] == text.as_bytes())
    }

    /// An array that is empty, as `_reconstruct(ndarray, (0,), 'b')` has it; or a type, as `dtype('u1', 0, 1)`.
    fn reduce(&mut self) -> Result<(), String> {
        let (name, Value::Tuple(with)) = self.two()? else { return Err("a call without a tuple".into()) };
        let made = match (name, &with[..]) {
            (Value::Name(Name::Reconstruct), [Value::Name(Name::Array), Value::Tuple(shape), kind]) => {
                (shape[..] == [Value::Number(0)] && self.is_text(kind, "b")).then_some(Name::Array)
            }
            (Value::Name(Name::Type), [kind, Value::Number(0), Value::Number(1)]) => self.is_text(kind, "u1").then_some(Name::Type),
            _ => None,
        };
        self.stack.push(Value::Blank(made.ok_or("an array of another kind than these files have; nothing of a pickle is executed")?));
        Ok(())
    }

    fn build(&mut self) -> Result<(), String> {
        let (blank, Value::Tuple(with)) = self.two()? else { return Err("an array without a description".into()) };
        let built = match (blank, &with[..]) {
            (Value::Blank(Name::Type), [Value::Number(3), order, Value::None, Value::None, Value::None, ..]) => {
                let rest = [-1, -1, 0].map(Value::Number);
                (self.is_text(order, "|") && with[5..] == rest).then_some(Value::Bytes)
            }
            (Value::Blank(Name::Array), [Value::Number(1), Value::Tuple(shape), Value::Bytes, Value::False, Value::Text(at)]) => {
                match shape[..] {
                    [Value::Number(rows), Value::Number(columns)] => {
                        let shape = [rows, columns].map(|n| usize::try_from(n).unwrap_or(usize::MAX));
                        (shape[0].checked_mul(shape[1]) == Some(at.len())).then(|| Value::Array(shape, at.clone()))
                    }
                    _ => None,
                }
            }
            _ => None,
        };
        self.stack.push(built.ok_or("an array of another shape or kind than these files have")?);
        Ok(())
    }
}
