//! What a classifier takes each class for: counted, as a table, as a picture.

use super::lettering::{HEIGHT, INK, WIDTH, Way, length, shortened, write};
use super::{ReportError, table};
use image::{ImageFormat, Rgb, RgbImage};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::Path;

#[derive(Debug, Clone, PartialEq)]
pub struct Confusion {
    classes: Vec<String>,
    /// (what it is, what it was taken for) -> how often; of many classes most pairs never come up.
    counts: BTreeMap<(usize, usize), u64>,
}

/// Beyond this many classes a picture would be of no use.
const MOST_DRAWN: usize = 1000;
const RIGHT: [f64; 3] = [0.0, 114.0, 178.0];
const WRONG: [f64; 3] = [213.0, 94.0, 0.0];
const PAPER: Rgb<u8> = Rgb([255; 3]);
const EDGE: u32 = 16;

impl Confusion {
    pub fn new(classes: &[String]) -> Confusion {
        Confusion { classes: classes.to_vec(), counts: BTreeMap::new() }
    }

    pub fn add(&mut self, truth: usize, guess: usize) {
        *self.counts.entry((truth, guess)).or_default() += 1;
    }

    pub fn count(&self, truth: usize, guess: usize) -> u64 {
        self.counts.get(&(truth, guess)).copied().unwrap_or(0)
    }

    pub fn total(&self) -> u64 {
        self.counts.values().sum()
    }

    pub fn right(&self) -> u64 {
        self.counts.iter().filter(|((truth, guess), _)| truth == guess).map(|(_, n)| n).sum()
    }

    /// Items of a class.
    fn of(&self, class: usize) -> u64 {
        self.counts.range((class, 0)..(class + 1, 0)).map(|(_, n)| n).sum()
    }

    /// What a class is most often mistaken for.
    fn mistake(&self, class: usize) -> Option<(usize, u64)> {
        let wrong = self.counts.range((class, 0)..(class + 1, 0)).filter(|((truth, guess), _)| truth != guess);
        wrong.map(|((_, guess), n)| (*guess, *n)).max_by_key(|(guess, n)| (*n, std::cmp::Reverse(*guess)))
    }

    /// A line for each class.
    pub fn table(&self) -> String {
        let row = |(i, name): (usize, &String)| {
            let (right, of) = (self.count(i, i), self.of(i));
            let taken = self.mistake(i).map_or(String::new(), |(guess, n)| format!("{} ({n})", self.classes[guess]));
            vec![name.clone(), of.to_string(), right.to_string(), percent(right, of), taken]
        };
        let rows: Vec<Vec<String>> = self.classes.iter().enumerate().map(row).collect();
        table(&["class", "pictures", "right", "accuracy", "most often mistaken for"], &rows)
    }

    pub fn to_json(&self) -> Value {
        let class = |(i, name): (usize, &String)| json!({ "class": name, "pictures": self.of(i), "right": self.count(i, i) });
        let guesses = self.counts.iter().map(|((truth, guess), n)| json!([truth, guess, n]));
        json!({ "classes": self.classes.iter().enumerate().map(class).collect::<Vec<_>>(), "guesses": guesses.collect::<Vec<_>>() })
    }

    /// A PNG file: a row for each class, a column for each guess. None where there are too many classes to draw.
    pub fn draw(&self, title: &str, path: &Path) -> Result<Option<Vec<u8>>, ReportError> {
        if self.classes.len() > MOST_DRAWN {
            return Ok(None);
        }
        let mut png = Cursor::new(vec![]);
        let written = self.picture(title).write_to(&mut png, ImageFormat::Png);
        written.map_err(|e| ReportError::Draw { path: path.into(), reason: e.to_string() })?;
        Ok(Some(png.into_inner()))
    }

    fn picture(&self, title: &str) -> RgbImage {
        let n = self.classes.len();
        // Cells with numbers and large letters; cells as high as small letters; squares alone.
        let (cell, scale) = match n {
            ..=25 => (56, 2),
            26..=150 => (HEIGHT + 2, 1),
            _ => (4, 0),
        };
        let names: Vec<String> = self.classes.iter().map(|c| shortened(c, 24)).collect();
        let name_space = names.iter().map(|c| length(c, scale) + WIDTH).max().unwrap_or(0).max(4 * WIDTH);
        let heads = [title, "rows: what it is; columns: what it was taken for"];
        let (left, top) = (EDGE + name_space, EDGE + 2 * 3 * HEIGHT + EDGE + name_space);
        let side = n as u32 * cell;
        let width = (left + side + length(" 100.0%", scale)).max(EDGE + heads.iter().map(|h| length(h, 2)).max().unwrap_or(0));
        let mut picture = RgbImage::from_pixel(width + EDGE, top + side + EDGE, PAPER);
        for (line, text) in heads.iter().enumerate() {
            write(&mut picture, (EDGE, EDGE + line as u32 * 3 * HEIGHT), text, 2, INK, Way::Right);
        }
        for (i, name) in names.iter().enumerate().filter(|_| scale > 0) {
            let middle = i as u32 * cell + (cell - HEIGHT * scale) / 2;
            write(&mut picture, (left - length(name, scale) - WIDTH / 2, top + middle), name, scale, INK, Way::Right);
            write(&mut picture, (left + middle, top - WIDTH), name, scale, INK, Way::Up);
            let share = percent(self.count(i, i), self.of(i));
            write(&mut picture, (left + side + WIDTH, top + middle), &share, scale, INK, Way::Right);
        }
        for (row, column) in (0..n).flat_map(|row| (0..n).map(move |column| (row, column))) {
            let count = self.count(row, column);
            let share = count as f64 / self.of(row).max(1) as f64;
            let (x, y) = (left + column as u32 * cell, top + row as u32 * cell);
            let colour = shade(if row == column { RIGHT } else { WRONG }, share);
            // One pixel between cells, where there is room for it.
            let drawn = if scale > 0 { cell - 1 } else { cell };
            for (a, b) in (0..drawn).flat_map(|a| (0..drawn).map(move |b| (a, b))) {
                picture.put_pixel(x + a, y + b, colour);
            }
            if cell > 2 * HEIGHT && count > 0 {
                let text = count.to_string();
                let scale = if length(&text, 2) <= cell { 2 } else { 1 };
                let at = (x + cell.saturating_sub(length(&text, scale)) / 2, y + (cell - HEIGHT * scale) / 2);
                write(&mut picture, at, &text, scale, if share > 0.4 { PAPER } else { INK }, Way::Right);
            }
        }
        picture
    }
}

fn percent(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".into(),
        _ => format!("{:.1}%", 100.0 * part as f64 / whole as f64),
    }
}

/// From nearly white to the full colour by the root of the share, so that rare mistakes can be seen.
fn shade(full: [f64; 3], share: f64) -> Rgb<u8> {
    Rgb(full.map(|c| (244.0 + share.sqrt() * (c - 244.0)).round() as u8))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(names: &[&str], pairs: &[(usize, usize, u64)]) -> Confusion {
        let mut c = Confusion::new(&names.iter().map(|n| n.to_string()).collect::<Vec<_>>());
        pairs.iter().for_each(|&(t, g, n)| (0..n).for_each(|_| c.add(t, g)));
        c
    }

    #[test]
    fn counts_and_table() {
        let c = counted(&["cat", "dog", "none"], &[(0, 0, 6), (0, 1, 2), (1, 1, 1), (1, 0, 1), (1, 2, 1)]);
        assert_eq!((c.total(), c.right(), c.count(0, 1), c.count(2, 2)), (11, 7, 2, 0));
        assert_eq!(
            c.table(),
            "class  pictures  right  accuracy  most often mistaken for\n\
             cat           8      6     75.0%  dog (2)\n\
             dog           3      1     33.3%  cat (1)\n\
             none          0      0         -\n"
        );
        let json = c.to_json();
        assert_eq!((&json["classes"][1]["pictures"], &json["guesses"][1]), (&json!(3), &json!([0, 1, 2])));
    }

    #[test]
    fn pictures_of_a_few_and_of_many_classes() {
        let path = Path::new("c.png");
        for n in [1, 2, 10, 25, 26, 100, 151, 1000] {
            let names: Vec<String> = (0..n).map(|i| format!("a class with a very long name, number {i}")).collect();
            let mut c = Confusion::new(&names);
            (0..n).for_each(|i| (0..12345).step_by(i + 1).for_each(|_| c.add(i, (i * i) % n)));
            let drawn = image::load_from_memory(&c.draw("t", path).unwrap().unwrap()).unwrap();
            assert!(drawn.width() < 5000 && drawn.height() < 5000, "{n}: {} x {}", drawn.width(), drawn.height());
        }
        let many: Vec<String> = (0..1001).map(|i| i.to_string()).collect();
        assert!(Confusion::new(&many).draw("t", path).unwrap().is_none());
        // The colours of what is right and of what is wrong.
        let c = counted(&["a", "b"], &[(0, 0, 4), (1, 0, 4)]);
        let p = c.picture("");
        let (right, wrong) = (Rgb(RIGHT.map(|v| v as u8)), Rgb(WRONG.map(|v| v as u8)));
        let has = |colour: Rgb<u8>| p.pixels().filter(|q| **q == colour).count() > 2000;
        assert!(has(right) && has(wrong));
    }
}
