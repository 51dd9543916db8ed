//! Sets of pictures: written here in the formats they come in, read back, damaged and refused; and the generated ones.

use crate::common::*;
use engine::{Cpu, DType, Data, Device, Recorder, Switches};
use image::{Rgb, RgbImage};
use kiln::data::Split;
use kiln::data::images::{self, GENERATED, ImageSet, SIZE, generate};
use kiln::recipe::Session;
use kiln::report::lettering::length;
use serde_json::Value;
use std::fs;
use std::path::Path;
use tempfile::tempdir;

const PICTURE: usize = 3 * 32 * 32;

/// Records with these label bytes in front of each picture; every byte of a picture depends on `mark`.
fn records(labels: &[&[u8]], mark: usize) -> Vec<u8> {
    let picture = |i: usize| (0..PICTURE).map(move |p| (p * 7 + i * 31 + mark * 101) as u8);
    labels.iter().enumerate().flat_map(|(i, labels)| labels.iter().copied().chain(picture(i))).collect()
}

/// Three records a file, with the labels 2 * file + record.
pub fn cifar_10(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    for (file, name) in (1..=5).map(|n| format!("data_batch_{n}.bin")).chain(["test_batch.bin".into()]).enumerate() {
        let labels: Vec<u8> = (0..3).map(|i| (2 * file + i) as u8 % 10).collect();
        let labels: Vec<&[u8]> = labels.chunks(1).collect();
        fs::write(dir.join(name), records(&labels, file)).unwrap();
    }
}

fn cifar_100(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("train.bin"), records(&[&[3, 99], &[19, 0]], 1)).unwrap();
    fs::write(dir.join("test.bin"), records(&[&[0, 50]], 2)).unwrap();
    let names: Vec<String> = (0..100).map(|i| format!("thing_{i}")).collect();
    fs::write(dir.join("fine_label_names.txt"), names.join("\n") + "\n\n").unwrap();
}

fn picture(path: &Path, width: u32, height: u32, colour: impl Fn(u32, u32) -> [u8; 3]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    RgbImage::from_fn(width, height, |x, y| Rgb(colour(x, y))).save(path).unwrap();
}

/// train/ and val/ of two classes.
fn folder(dir: &Path) {
    for split in ["train", "val"] {
        for (class, level) in [("cold", 40), ("warm", 200)] {
            picture(&dir.join(split).join(class).join("a.png"), 32, 32, |x, y| [level, x as u8, y as u8]);
            picture(&dir.join(split).join(class).join("b.jpg"), 40, 30, |_, _| [level, 100, 100]);
        }
    }
}

fn open(dir: &Path) -> (ImageSet, ImageSet) {
    // Nothing is held out: what is there to validate or to test with is read as it is.
    let sets = images::open(dir, None, SIZE, 0.0).unwrap_or_else(|e| panic!("{e}"));
    (sets.train, sets.val)
}

#[test]
fn cifar_10_is_read_as_it_was_written() {
    let dir = tempdir().unwrap();
    cifar_10(dir.path());
    let (train, val) = open(dir.path());
    assert_eq!(train.labels, [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9, 0]);
    assert_eq!((train.len(), train.size, val.labels.as_slice()), (15, 32, &[0u16, 1, 2][..]));
    let written = records(&[&[2], &[3], &[4]], 1);
    assert_eq!(train.item(4), (&written[PICTURE + 2..][..PICTURE], 3));
    assert_eq!((train.classes[0].as_str(), train.classes[9].as_str()), ("airplane", "truck"));

    let before = train.fingerprint();
    let mut changed = train.clone();
    changed.pixels[PICTURE] ^= 1;
    assert_ne!(changed.fingerprint(), before);
    // A picture that is said to be of another class is other data.
    let mut relabelled = train.clone();
    relabelled.labels[3] = 5;
    assert_ne!(relabelled.fingerprint(), before);
    fs::write(dir.path().join("batches.meta.txt"), "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n\n").unwrap();
    let named = open(dir.path()).0;
    assert_eq!(named.classes[9], "j");
    assert_ne!(named.fingerprint(), before);

    let seen = kiln(["data", "inspect", &text(dir.path()), "--json"]).ok().out;
    let seen: Value = serde_json::from_str(&seen).unwrap();
    // A tenth of what is to learn from is held out, and the test batch is another split.
    let sets = images::open(dir.path(), None, SIZE, images::VAL_SHARE).unwrap();
    assert_eq!((&seen["format"], &seen["train"]["pictures"]), (&"cifar-10".into(), &14.into()));
    assert_eq!((&seen["val"]["pictures"], &seen["test"]["pictures"]), (&1.into(), &3.into()));
    assert_eq!(seen["train"]["fingerprint"], sets.train.fingerprint());
    let counts = ["train", "val", "test"].map(|split| seen["classes"][2][split].as_u64().unwrap());
    assert_eq!(counts, [2, 0, 1]);
    assert_eq!(sets.val.item(0), named.item(9), "the same one every time");
    assert_eq!((sets.train.item(8), sets.train.item(9)), (named.item(8), named.item(10)));
    let shown = kiln(["data", "inspect", &text(dir.path())]).ok().out;
    assert!(shown.contains("train 14 pictures") && shown.contains("validation 1 ") && shown.contains("test 3 "), "{shown}");
}

#[test]
fn cifar_100_has_the_fine_labels() {
    let dir = tempdir().unwrap();
    cifar_100(dir.path());
    let (train, val) = open(dir.path());
    assert_eq!((train.labels.as_slice(), val.labels.as_slice()), (&[99, 0][..], &[50][..]));
    assert_eq!((train.classes.len(), train.classes[99].as_str()), (100, "thing_99"));
    assert_eq!(train.item(1).0, &records(&[&[3, 99], &[19, 0]], 1)[PICTURE + 4..]);
}

#[test]
fn folders_are_read_in_the_order_of_names() {
    let dir = tempdir().unwrap();
    folder(dir.path());
    fs::write(dir.path().join("train/cold/.hidden"), "no picture").unwrap();
    fs::write(dir.path().join("LICENSE"), "no class").unwrap();
    let (train, val) = open(dir.path());
    assert_eq!(train, val, "written alike");
    assert_eq!((train.classes.join(" "), train.labels.as_slice()), ("cold warm".into(), &[0, 0, 1, 1][..]));
    let expected: Vec<u8> = (0..PICTURE).map(|i| [200, i % 32, i / 32 % 32][i / 1024] as u8).collect();
    assert_eq!(train.item(2).0, expected, "a png of the right size comes as it is");
    let near = |a: u8, b: u8| a.abs_diff(b) <= 3;
    assert!(train.item(3).0.iter().enumerate().all(|(i, &v)| near(v, if i < 1024 { 200 } else { 100 })), "a jpg of one colour");
}

#[test]
fn pictures_are_cropped_to_their_middle_and_resized() {
    let dir = tempdir().unwrap();
    // Red left and right of a green square; the square's left half is brighter.
    for class in ["train/a", "train/b", "val/a", "val/b"] {
        picture(&dir.path().join(class).join("x.png"), 96, 64, |x, _| match x {
            16..48 => [0, 200, 0],
            48..80 => [0, 100, 0],
            _ => [255, 0, 0],
        });
    }
    let set = images::open(dir.path(), "folder".parse().ok(), 8, 0.0).unwrap().train;
    let pixels = set.item(0).0;
    assert_eq!((set.size, pixels.len()), (8, 192));
    assert!(pixels[..64].iter().chain(&pixels[128..]).all(|&v| v == 0), "{pixels:?}");
    assert_eq!((pixels[64], pixels[66], pixels[69], pixels[71]), (200, 200, 100, 100));
}

/// Cameras leave the pixels as the sensor has them, and say beside them how they were held.
#[test]
fn pictures_are_turned_as_their_camera_was() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("x.jpg");
    picture(&path, 32, 32, |x, _| [if x < 16 { 255 } else { 0 }; 3]);
    let plain = fs::read(&path).unwrap();
    let mut seen = vec![0; PICTURE];
    // Means of the upper and of the left half: 6 says that the sensor's left side is up.
    let mut halves = |orientation: u8| {
        let tag = [b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0".as_slice(), &[orientation, 0, 0, 0, 0, 0, 0]].concat();
        let segment = [&[0xff, 0xe1, 0, 2 + tag.len() as u8], &tag[..]].concat();
        fs::write(&path, [&plain[..2], &segment, &plain[2..]].concat()).unwrap();
        images::read_picture(&path, SIZE, &mut seen).unwrap();
        let mean = |inside: fn(usize) -> bool| (0..1024).filter(|&i| inside(i)).map(|i| u32::from(seen[i])).sum::<u32>() / 512;
        (mean(|i| i / 32 < 16), mean(|i| i % 32 < 16))
    };
    let near = |a: u32, b: u32| a.abs_diff(b) < 20;
    let (upright, turned) = (halves(1), halves(6));
    assert!(near(upright.0, 127) && near(upright.1, 255), "{upright:?}");
    assert!(near(turned.0, 255) && near(turned.1, 127), "{turned:?}");
}

/// What a file says of its size is not believed with memory.
#[test]
fn a_picture_that_claims_to_be_enormous_is_refused() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("x.png");
    let chunk = |body: &[u8]| {
        let crc =
            body.iter().fold(!0u32, |c, &b| (0..8).fold(c ^ u32::from(b), |c, _| if c & 1 == 1 { c >> 1 ^ 0xedb8_8320 } else { c >> 1 }));
        [&(body.len() as u32 - 4).to_be_bytes()[..], body, &(!crc).to_be_bytes()].concat()
    };
    let header = [b"IHDR".as_slice(), &60_000u32.to_be_bytes(), &60_000u32.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    fs::write(&path, [b"\x89PNG\r\n\x1a\n".as_slice(), &chunk(&header), &chunk(b"IDATx"), &chunk(b"IEND")].concat()).unwrap();
    let error = images::read_picture(&path, SIZE, &mut vec![0; PICTURE]).unwrap_err().to_string();
    assert!(error.contains("x.png") && error.contains("limit"), "{error}");
}

#[test]
fn a_set_without_validation_is_split_once_and_for_all() {
    let dir = tempdir().unwrap();
    for i in 0..300u32 {
        picture(&dir.path().join(["odd", "even"][(i % 2) as usize]).join(format!("{i:03}.png")), 4, 4, |_, _| [i as u8, (i >> 8) as u8, 0]);
    }
    let read = || {
        let sets = images::open(dir.path(), None, 4, images::VAL_SHARE).unwrap();
        (sets.train, sets.val)
    };
    let (train, val) = read();
    assert_eq!((&train, &val), (&read().0, &read().1));
    let numbers =
        |set: &ImageSet| -> Vec<u32> { (0..set.len()).map(|i| set.item(i).0[0] as u32 + 256 * set.item(i).0[16] as u32).collect() };
    let mut all = [numbers(&train), numbers(&val)].concat();
    all.sort();
    assert_eq!(all, (0..300).collect::<Vec<_>>(), "every picture is in one of the two");
    assert!((15..=45).contains(&val.len()), "{}", val.len());
    // "even" sorts before "odd".
    assert!(numbers(&val).iter().zip(&val.labels).all(|(n, &label)| (n + u32::from(label)) % 2 == 1));
}

#[test]
fn damaged_sets_are_refused() {
    let dir = tempdir().unwrap();
    // Makes a set, damages it, and what the message must hold.
    type Case = (fn(&Path), fn(&Path), &'static [&'static str]);
    let cases: &[Case] = &[
        (
            cifar_10,
            |d| damage(&d.join("data_batch_2.bin"), |b| b.truncate(b.len() - 1)),
            &["data_batch_2.bin", "9218 bytes", "3073", "cut short"],
        ),
        (
            cifar_10,
            |d| damage(&d.join("data_batch_1.bin"), |b| b.truncate(2 * 3073)),
            &["data_batch_1.bin", "2 pictures", "has 3", "cut short"],
        ),
        (cifar_10, |d| damage(&d.join("test_batch.bin"), |b| b.clear()), &["test_batch.bin", "0 bytes"]),
        (
            cifar_10,
            |d| damage(&d.join("data_batch_5.bin"), |b| b[2 * 3073] = 10),
            &["data_batch_5.bin", "record 2", "label 10", "below 10"],
        ),
        (
            cifar_10,
            |d| fs::remove_file(d.join("data_batch_3.bin")).unwrap(),
            &["data_batch_3.bin", "missing", "binary version of CIFAR-10"],
        ),
        (cifar_10, |d| fs::remove_file(d.join("test_batch.bin")).unwrap(), &["test_batch.bin: missing"]),
        (cifar_10, |d| fs::write(d.join("batches.meta.txt"), "cat\ndog\n").unwrap(), &["batches.meta.txt", "2 class names"]),
        (cifar_10, |d| fs::write(d.join("batches.meta.txt"), [0xff, 0xfe]).unwrap(), &["batches.meta.txt", "UTF-8"]),
        (
            |d| fs::create_dir_all(d).unwrap(),
            |d| (1..=5).for_each(|i| fs::write(d.join(format!("data_batch_{i}")), "pickle").unwrap()),
            &["data_batch_1", "not a file of CIFAR-10's Python version", "no pickle of protocol 2"],
        ),
        (
            cifar_10,
            |d| {
                fs::remove_file(d.join("data_batch_1.bin")).unwrap();
                fs::create_dir(d.join("data_batch_1.bin")).unwrap()
            },
            &["data_batch_1.bin", "cannot read"],
        ),
        (cifar_100, |d| damage(&d.join("train.bin"), |b| b.push(0)), &["train.bin", "6149 bytes", "3074"]),
        (cifar_100, |d| damage(&d.join("train.bin"), |b| b[3074] = 20), &["train.bin", "record 1", "label 20", "below 20"]),
        (cifar_100, |d| damage(&d.join("test.bin"), |b| b[1] = 100), &["test.bin", "record 0", "label 100"]),
        (cifar_100, |d| fs::remove_file(d.join("test.bin")).unwrap(), &["test.bin", "missing"]),
        (cifar_100, |d| fs::remove_file(d.join("fine_label_names.txt")).unwrap(), &["fine_label_names.txt", "missing"]),
        (folder, |d| damage(&d.join("train/warm/a.png"), |b| b.truncate(b.len() / 2)), &["train/warm/a.png", "not a readable picture"]),
        (folder, |d| damage(&d.join("val/cold/b.jpg"), |b| b.truncate(b.len() / 2)), &["val/cold/b.jpg", "not a readable picture"]),
        (folder, |d| damage(&d.join("val/cold/b.jpg"), |b| b.truncate(b.len() - 20)), &["val/cold/b.jpg", "not a readable picture"]),
        (folder, |d| damage(&d.join("train/cold/a.png"), |b| b.clear()), &["train/cold/a.png", "not a readable picture"]),
        (folder, |d| damage(&d.join("train/cold/a.png"), |b| b[60] ^= 0x10), &["train/cold/a.png", "not a readable picture"]),
        (folder, |d| fs::write(d.join("train/cold/c.png"), "GIF89a and so on").unwrap(), &["train/cold/c.png", "not a readable picture"]),
        (folder, |d| fs::write(d.join("train/cold/c.webp"), "").unwrap(), &["train/cold/c.webp", "neither .png nor .jpg"]),
        (folder, |d| fs::create_dir(d.join("train/hot")).unwrap(), &["train/hot", "no pictures"]),
        (folder, |d| fs::remove_dir_all(d.join("val/warm")).unwrap(), &["val", "1 folders", "at least two"]),
        (folder, |d| picture(&d.join("val/hot/a.png"), 4, 4, |_, _| [0; 3]), &["train/hot", "missing", "val/hot"]),
        (folder, |d| picture(&d.join("train/hot/a.png"), 4, 4, |_, _| [0; 3]), &["val/hot", "missing", "train/hot"]),
        (folder, |d| fs::remove_dir_all(d.join("train")).unwrap(), &["train", "missing", "val"]),
        (folder, |d| fs::remove_dir_all(d.join("val")).unwrap(), &["train", "no validation set"]),
        (|d| cifar_10(&d.join("cifar-10-batches-bin")), |_| (), &["1 folders"]),
    ];
    let mut problems = vec![];
    for (i, (set, change, parts)) in cases.iter().enumerate() {
        let data = dir.path().join(i.to_string());
        set(&data);
        change(&data);
        let out = text(&dir.path().join("sheet.png"));
        problems.extend(kiln(["data", "inspect", &text(&data)]).problem(parts));
        problems.extend(kiln(["data", "preview", "--data", &text(&data), "--out", &out]).problem(parts));
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert!(!dir.path().join("sheet.png").exists());
}

#[test]
fn bad_arguments_are_refused() {
    let dir = tempdir().unwrap();
    let [good, other, nothing] = ["good", "other", "nothing"].map(|name| dir.path().join(name));
    cifar_10(&good);
    folder(&other);
    fs::create_dir(&nothing).unwrap();
    let [good, other, nothing, out] = [&good, &other, &nothing, &dir.path().join("sheet.png")].map(|path| text(path));
    let cases: Vec<(String, &[&str])> = vec![
        ("--data /nowhere/at/all".into(), &["/nowhere/at/all", "No such file"]),
        (format!("--data {nothing}"), &["nothing", "CIFAR-10", "for each class"]),
        (format!("--data {good}/test_batch.bin"), &["test_batch.bin", "is a file", "CIFAR"]),
        (format!("--data {good} --format cifar-100"), &["fine_label_names.txt", "missing", "CIFAR-100"]),
        (format!("--data {good} --format folder"), &["0 folders"]),
        (format!("--data {good} --format zip"), &["format = zip", "cifar-10, cifar-10-python, cifar-100, parquet, folder"]),
        (format!("--data {good} --size 64"), &["size = 64", "32 pixels"]),
        (format!("--data {other} --size 0"), &["size = 0", "1 to 512"]),
        (format!("--data {other} --size 99999999999"), &["size = 99999999999", "1 to 512"]),
        (format!("--data {good} --split other"), &["other", "train", "val", "test"]),
        (format!("--data {other} --split test"), &["other", "no test split"]),
        ("--split test".into(), &["no test split"]),
        (format!("--data {good} --count 0"), &["--count", "0"]),
        ("--least-area 0".into(), &["--least-area 0"]),
        ("--least-area nan".into(), &["--least-area NaN"]),
        ("--size 64".into(), &["--size", "32x32"]),
        ("--out /nowhere/at/all.png".into(), &["/nowhere/at/all.png"]),
    ];
    for (args, parts) in cases {
        let out = if args.contains("--out") { String::new() } else { format!("--out {out}") };
        kiln(format!("data preview {args} {out}").split_whitespace()).fails(parts);
    }
    assert!(!Path::new(&out).exists());
}

#[test]
fn a_preview_shows_a_row_for_each_class() {
    let dir = tempdir().unwrap();
    let (data, out) = (dir.path().join("data"), dir.path().join("sheet.png"));
    folder(&data);
    let preview = |args: &str| {
        let all = format!("data preview --out {} {args}", out.display());
        let said = kiln(all.split_whitespace()).ok().out;
        (said, image::open(&out).unwrap().into_rgb8())
    };
    let (said, sheet) = preview(&format!("--data {} --count 7 --split val", data.display()));
    assert!(said.contains("4 pictures of the val split, in the order cold, warm"), "{said}");
    // Three times as large, 100 pixels apart and 112 below each other, under a heading of 24; a class has two pictures, so the third
    // column is blank.
    assert_eq!(sheet.dimensions(), (4 + 3 * 100 + 8, 24 + 2 * 112 + 4));
    let red = |sheet: &RgbImage, row: u32, column: u32| sheet.get_pixel(4 + column * 100 + 50, 24 + row * 112 + 50).0[0];
    for (row, level) in [(0, 40u8), (1, 200)] {
        for (column, expected) in [(0, level), (1, level), (2, 255)] {
            let seen = red(&sheet, row, column);
            assert!(seen.abs_diff(expected) <= 3, "row {row}, column {column}: {seen}");
        }
        let caption = (0..96).flat_map(|x| (98..106).map(move |y| (4 + x, 24 + row * 112 + y)));
        assert!(caption.filter(|&(x, y)| sheet.get_pixel(x, y).0[0] < 100).count() > 20, "row {row} has a label");
    }

    // Of the training split the same pictures follow, cut and mirrored.
    let (_, sheet) = preview(&format!("--data {} --count 4 --least-area 0.5", data.display()));
    let second = 2 * 100 + 8;
    let right = image::imageops::crop_imm(&sheet, second, 0, sheet.width() - second, sheet.height()).to_image();
    let widest = [length("as they are", 2), length("as training sees them", 2)].map(|l| l.max(200) + 8);
    assert_eq!(sheet.width(), widest[0] + widest[1] + 4);
    for (row, level) in [(0, 40u8), (1, 200)] {
        assert!((0..2).all(|column| red(&right, row, column).abs_diff(level) <= 3), "row {row}");
    }
    assert_ne!(preview(&format!("--data {} --count 4 --least-area 1.0", data.display())).1, sheet);

    let (_, first) = preview("--count 20");
    assert_eq!(first.height(), 24 + 10 * 112 + 4);
    assert_eq!(preview("--count 20").1, first);
    assert_ne!(preview("--count 20 --seed 1").1, first);
    let (_, few) = preview("--count 4 --split val");
    assert_eq!(few.dimensions(), (4 + 200 + 8, 24 + 2 * 112 + 4), "fewer than the classes: one of each");
}

/// A picture that is brighter to the right, cut and mirrored by the same draws with and without the switch.
#[test]
fn pictures_are_mirrored_only_where_the_switch_says_so() {
    const SIDE: usize = 9;
    let (n, picture) = (64, (0..SIDE * SIDE).map(|p| (p % SIDE * 25 + p / SIDE) as u8).collect::<Vec<u8>>());
    let seen = |mirror: bool| {
        let r = Recorder::new();
        let set = r.feed("set", &[1, 1, SIDE, SIDE], DType::U8);
        let (index, rng) = (r.feed("index", &[n], DType::I32), r.feed("rng", &[4], DType::I32));
        r.output("seen", kiln::data::images::pictures::augmented_pictures(set, index, rng, 0.5, mirror));
        let mut s = Session::new(&Device::cpu(Cpu::new(1)), &Switches::default(), 0);
        s.load("augment", r.finish()).unwrap();
        let rng = engine::philox::rng_feed(3, 0, 0);
        s.run("augment", &[("set", Data::U8(&picture)), ("index", Data::I32(&vec![0; n])), ("rng", Data::I32(&rng))]).unwrap();
        s.read("augment", "seen").unwrap()
    };
    let (with, without) = (seen(true), seen(false));
    assert!(without.chunks(SIDE).all(|row| row[0] < row[SIDE - 1]), "none is mirrored");
    let mut mirrored = 0;
    for (a, b) in with.chunks(SIDE * SIDE).zip(without.chunks(SIDE * SIDE)) {
        let turned: Vec<f32> = b.chunks(SIDE).flat_map(|row| row.iter().rev().copied()).collect();
        assert!(a == b || a == turned, "the cut is the same");
        mirrored += usize::from(a == turned);
    }
    assert!((16..48).contains(&mirrored), "{mirrored} of {n}");

    let dir = tempdir().unwrap();
    let preview = |args: &str| {
        let out = dir.path().join("sheet.png");
        kiln(format!("data preview --count 20 --out {} {args}", out.display()).split_whitespace()).ok();
        fs::read(out).unwrap()
    };
    assert!(preview("") == preview("--mirror true") && preview("") != preview("--mirror false"));
}

/// Every preview of training pictures shows what the op of training makes of them.
#[test]
fn a_preview_augments_as_training_does() {
    let dir = tempdir().unwrap();
    let out = dir.path().join("sheet.png");
    kiln(["data", "preview", "--count", "10", "--out", &text(&out)]).ok();
    let sheet = image::open(&out).unwrap().into_rgb8();
    let second = length("as they are", 2) + 8;
    // The middle of each enlarged pixel of the picture at these pixels of the sheet.
    let pixels = |left: u32, row: u32| -> Vec<u8> {
        let at = |c: usize, y: u32, x: u32| sheet.get_pixel(4 + left + 3 * x + 1, 24 + row * 112 + 3 * y + 1).0[c];
        (0..3).flat_map(|c| (0..32).flat_map(move |y| (0..32).map(move |x| (c, y, x)))).map(|(c, y, x)| at(c, y, x)).collect()
    };
    let set = generate(0, Split::Train, GENERATED[0]);
    for class in 0..10 {
        let original = pixels(0, class);
        assert!((0..set.len()).any(|i| set.item(i).1 == class as u16 && set.item(i).0 == original), "class {class}");
        let seen = pixels(second, class);
        let mirrored: Vec<u8> = seen.chunks(32).flat_map(|row| row.iter().rev().copied()).collect();
        assert_ne!(seen, original, "class {class}");
        // A cut of at least 80% moves no pixel far: the picture, or its mirror image, is still much like the original.
        let apart = |a: &[u8]| a.iter().zip(&original).map(|(a, b)| f64::from(a.abs_diff(*b))).sum::<f64>() / 3072.0;
        assert!(apart(&seen).min(apart(&mirrored)) < 45.0, "class {class}: {} {}", apart(&seen), apart(&mirrored));
    }
}

#[test]
fn generated_pictures_are_a_function_of_seed_split_and_number() {
    let set = generate(3, Split::Train, 500);
    assert_eq!(set, generate(3, Split::Train, 500));
    assert_eq!(set.counts(), [50; 10]);
    let longer = generate(3, Split::Train, 600);
    assert_eq!(longer.pixels[..set.pixels.len()], set.pixels);
    // The same on every machine.
    assert_eq!(format!("{:016x}", set.fingerprint()), "3d30ad375514c489");

    let others = [generate(3, Split::Val, 500), generate(4, Split::Train, 500)];
    let all = [&set, &others[0], &others[1]];
    let mut pictures: Vec<&[u8]> = all.iter().flat_map(|set| (0..set.len()).map(|i| set.item(i).0)).collect();
    pictures.sort();
    pictures.dedup();
    assert_eq!(pictures.len(), 1500, "no two pictures are the same");
}

/// The share of `val` that is nearest to the mean training picture of its class.
fn nearest_centroid(train: &ImageSet, val: &ImageSet) -> f64 {
    let mut centroids = vec![vec![0f64; PICTURE]; train.classes.len()];
    for (i, count) in (0..train.len()).map(|i| (i, train.counts()[train.labels[i] as usize] as f64)) {
        let (picture, label) = train.item(i);
        centroids[label as usize].iter_mut().zip(picture).for_each(|(sum, &v)| *sum += f64::from(v) / count);
    }
    let distance = |c: &[f64], picture: &[u8]| c.iter().zip(picture).map(|(a, &b)| (a - f64::from(b)).powi(2)).sum::<f64>();
    let right = |&i: &usize| {
        let (picture, label) = val.item(i);
        let distances: Vec<f64> = centroids.iter().map(|c| distance(c, picture)).collect();
        (0..distances.len()).min_by(|&a, &b| distances[a].total_cmp(&distances[b])) == Some(label as usize)
    };
    (0..val.len()).filter(right).count() as f64 / val.len() as f64
}

#[test]
fn generated_classes_can_be_told_apart_but_not_by_averages() {
    let [train, val] = Split::ALL.map(|split| generate(0, split, GENERATED[split as usize]));
    let share = nearest_centroid(&train, &val);
    // Chance is 0.1, with a standard deviation of 0.007 over 2000 pictures.
    assert!((0.14..0.6).contains(&share), "{share}");
}
