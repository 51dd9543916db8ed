//! Pictures as others leave them: CIFAR-10 in the pickles that torchvision unpacks, and parquet files of Hugging Face; written here byte by byte, and damaged.

use crate::common::*;
use kiln::data::images::{self, Sets};
use serde_json::Value;
use std::fs;
use std::path::Path;
use tempfile::tempdir;

const PICTURE: usize = 3 * 32 * 32;

fn text_of(bytes: &[u8]) -> Vec<u8> {
    [&[b'U', bytes.len() as u8], bytes].concat()
}

fn pixels(mark: usize, count: usize) -> Vec<u8> {
    (0..count * PICTURE).map(|p| (p * 7 + mark * 101) as u8).collect()
}

/// As Python 2 pickled a batch.
fn batch(labels: &[u8], data: &[u8]) -> Vec<u8> {
    let mut out = vec![0x80, 2, b'}', b'q', 1, b'('];
    out.extend([text_of(b"batch_label"), vec![b'q', 2], text_of(b"training batch 1 of 5"), vec![b'q', 3]].concat());
    out.extend([text_of(b"labels"), b"q\x04]q\x05(".to_vec()].concat());
    labels.iter().for_each(|label| out.extend([b'K', *label]));
    out.extend(
        [b"e".to_vec(), text_of(b"data"), b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08".to_vec()].concat(),
    );
    out.extend(b"K\0\x85q\x09U\x01bq\x0a\x87q\x0bRq\x0c(K\x01");
    out.extend(
        [&[b'K', labels.len() as u8, b'M'][..], &(PICTURE as u16).to_le_bytes(), b"\x86q\x0dcnumpy\ndtype\nq\x0eU\x02u1q\x0f"].concat(),
    );
    out.extend(b"K\0K\x01\x87q\x10Rq\x11(K\x03U\x01|q\x12NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tq\x13b\x89T");
    out.extend([&(data.len() as u32).to_le_bytes()[..], data, b"q\x14tq\x15b"].concat());
    out.extend([text_of(b"filenames"), b"q\x16]q\x17(".to_vec()].concat());
    (0..labels.len()).for_each(|i| out.extend([text_of(format!("{i}.png").as_bytes()), vec![b'r', 24 + i as u8, 1, 0, 0]].concat()));
    out.extend(b"eu.");
    out
}

fn meta(names: &[&str]) -> Vec<u8> {
    let mut out =
        [&[0x80, 2, b'}', b'q', 1, b'('][..], &text_of(b"num_cases_per_batch"), b"q\x02M\x10'", &text_of(b"label_names"), b"q\x03]q\x04("]
            .concat();
    names.iter().for_each(|name| out.extend([text_of(name.as_bytes()), vec![b'q', 5]].concat()));
    out.extend([b"e".to_vec(), text_of(b"num_vis"), b"q\x10M\0\x0cu.".to_vec()].concat());
    out
}

const NAMES: [&str; 10] = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

fn python(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    for (mark, name) in (1..=5).map(|i| format!("data_batch_{i}")).chain(["test_batch".into()]).enumerate() {
        let labels: Vec<u8> = (0..3).map(|i| (2 * mark + i) as u8 % 10).collect();
        fs::write(dir.join(name), batch(&labels, &pixels(mark, 3))).unwrap();
    }
    fs::write(dir.join("batches.meta"), meta(&NAMES)).unwrap();
}

fn open(dir: &Path, share: f64) -> Sets {
    images::open(dir, None, 32, share).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn torchvisions_cifar_10_is_read_as_it_lies() {
    let dir = tempdir().unwrap();
    // Torchvision is told the folder above.
    python(&dir.path().join("cifar-10-batches-py"));
    let sets = open(dir.path(), 0.0);
    assert_eq!(sets, open(&dir.path().join("cifar-10-batches-py"), 0.0));
    assert_eq!(sets.train.labels, [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9, 0]);
    assert_eq!((sets.val.labels.as_slice(), sets.train.classes.join(" ")), (&[0u16, 1, 2][..], NAMES.join(" ")));
    assert_eq!(sets.train.item(4), (&pixels(1, 3)[PICTURE..2 * PICTURE], 3));
    assert!(sets.test.is_none(), "with nothing held out, the test batch validates");
    // The same pictures are held out as in the binary version.
    let held = open(dir.path(), 0.1);
    assert_eq!((held.train.len(), held.val.item(0), held.test), (14, sets.train.item(9), Some(sets.val)));
    let more = open(dir.path(), 0.3);
    assert_eq!((more.val.len(), more.val.item(1)), (2, sets.train.item(9)), "a larger share holds the smaller one");

    let seen: Value = serde_json::from_str(&kiln(["data", "inspect", &text(dir.path()), "--json"]).ok().out).unwrap();
    assert_eq!((&seen["format"], &seen["test"]["pictures"]), (&"cifar-10-python".into(), &3.into()));
    let out = text(&dir.path().join("sheet.png"));
    let said = kiln(["data", "preview", "--data", &text(dir.path()), "--split", "test", "--out", &out]).ok().out;
    assert!(said.contains("3 pictures of the test split"), "{said}");
}

/// Nothing that a pickle asks for is done, and nothing that it claims is believed.
#[test]
fn other_pickles_are_refused() {
    let dir = tempdir().unwrap();
    python(dir.path());
    let path = dir.path().join("data_batch_2");
    let good = fs::read(&path).unwrap();
    let at = |part: &[u8]| good.windows(part.len()).position(|w| w == part).unwrap();
    let with = |part: &[u8], other: &[u8]| [&good[..at(part)], other, &good[at(part) + part.len()..]].concat();
    let length = &(3 * PICTURE as u32).to_le_bytes()[..];
    let many = |op: &[u8], n: usize| [&[0x80, 2][..], &op.repeat(n), b"."].concat();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (vec![], "cut short"),
        (good[..good.len() / 2].to_vec(), "cut short"),
        (good[..good.len() - 1].to_vec(), "cut short"),
        ([&good[..], b"."].concat(), "goes on after its end"),
        (with(&[0x80, 2], &[0x80, 4]), "no pickle of protocol 2"),
        (b"\x80\x02cos\nsystem\nU\x04true\x85R.".to_vec(), "it names \"os.system\""),
        (b"\x80\x02c__builtin__\neval\nU\x011\x85R.".to_vec(), "nothing of a pickle is executed"),
        (with(b"cnumpy\ndtype", b"cnumpy\nmemmap"), "it names \"numpy.memmap\""),
        (with(b"K\0K\x01\x87q\x10R", b"K\0K\x01\x87q\x10o"), "an instruction that these files do not have (0x6f)"),
        (b"\x80\x02X\x01\0\0\0a.".to_vec(), "(0x58)"),
        (b"\x80\x02i os\n.".to_vec(), "(0x69)"),
        (with(length, &[0xff; 4]), "a text of -1 bytes"),
        (with(length, &i32::MAX.to_le_bytes()), "cut short"),
        (with(b"U\x02u1", b"U\x02f8"), "an array of another kind"),
        (with(b"M\0\x0c\x86", b"M\x01\x0c\x86"), "an array of another shape"),
        (with(b"labels", b"lahels"), "it has no \"labels\""),
        (with(b"\x09filenames", b"\x0bbatch_label"), "\"batch_label\" twice"),
        (batch(&[1, 2, 10], &pixels(0, 3)), "picture 2 has the label 10, which must be below 10"),
        (batch(&[1, 2], &pixels(1, 2)), "2 pictures, where another file of CIFAR-10 has 3"),
        (batch(&[], &[]), "0 labels"),
        (b"\x80\x02}q\x01r\xff\xff\xff\xff.".to_vec(), "of the memo"),
        (b"\x80\x02]q\x01h\x01.".to_vec(), "place 1 of the memo is no text"),
        (b"\x80\x02]]a.".to_vec(), "a list of other things"),
        (b"\x80\x02}}U\x01a}s.".to_vec(), "an entry that these files do not have"),
        (b"\x80\x02NN\x85\x85\x85.".to_vec(), "a tuple that these files do not have"),
        (b"\x80\x02e.".to_vec(), "a mark that is not there"),
        (b"\x80\x02(}U\x01a(NNt(e.".to_vec(), "entries of no list"),
        (b"\x80\x02R.".to_vec(), "values that are not there"),
        (b"\x80\x02K\x01.".to_vec(), "no dictionary"),
        (many(b"N", 1 << 18), "values wait"),
        (many(b"(", 20), "(0x28)"),
    ];
    for (bytes, part) in cases {
        fs::write(&path, &bytes).unwrap();
        let error = images::open(dir.path(), None, 32, 0.1).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("data_batch_2") && error.contains(part), "{part}: {error}");
    }
    // A file that only says that it is long is not read.
    fs::File::create(&path).unwrap().set_len((64 << 20) + 1).unwrap();
    assert!(images::open(dir.path(), None, 32, 0.1).unwrap_err().to_string().contains("at most 67108864"));
    fs::remove_file(&path).unwrap();
    assert!(images::open(dir.path(), None, 32, 0.1).unwrap_err().to_string().contains("missing; the Python version of CIFAR-10"));
    fs::write(&path, &good).unwrap();
    fs::write(dir.path().join("batches.meta"), meta(&NAMES[..9])).unwrap();
    assert!(images::open(dir.path(), None, 32, 0.1).unwrap_err().to_string().contains("9 class names, not 10"));
}

/// Rows of (picture file, label), as the package `datasets` writes them; with names of classes, or without.
fn rows(path: &Path, label: &str, pictures: &[(Vec<u8>, i64)], names: &[&str]) {
    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::{metadata::KeyValue, properties::WriterProperties, writer::SerializedFileWriter};
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let schema =
        format!("message m {{ optional group img {{ optional binary bytes; optional binary path (UTF8); }} optional int64 {label}; }}");
    let schema = parquet::schema::parser::parse_message_type(&schema).unwrap();
    let noted = serde_json::json!({"info": {"features": {"img": {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}}});
    let noted = (!names.is_empty()).then(|| vec![KeyValue::new("huggingface".into(), noted.to_string())]);
    let properties = WriterProperties::builder().set_key_value_metadata(noted).build();
    let mut writer = SerializedFileWriter::new(fs::File::create(path).unwrap(), schema.into(), properties.into()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for i in 0..3 {
        let mut column = group.next_column().unwrap().unwrap();
        match i {
            0 => {
                let bytes: Vec<ByteArray> = pictures.iter().map(|p| ByteArray::from(p.0.clone())).collect();
                let levels: Vec<i16> = pictures.iter().map(|_| 2).collect();
                column.typed::<ByteArrayType>().write_batch(&bytes, Some(&levels), None).unwrap();
            }
            1 => {
                column.typed::<ByteArrayType>().write_batch(&[], Some(&vec![1; pictures.len()]), None).unwrap();
            }
            _ => {
                let labels: Vec<i64> = pictures.iter().map(|p| p.1).collect();
                column.typed::<Int64Type>().write_batch(&labels, Some(&vec![1; pictures.len()]), None).unwrap();
            }
        }
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

fn png(side: u32, level: u8) -> Vec<u8> {
    let mut out = std::io::Cursor::new(vec![]);
    let picture = image::RgbImage::from_fn(side, side, |x, y| image::Rgb([level, x as u8, y as u8]));
    picture.write_to(&mut out, image::ImageFormat::Png).unwrap();
    out.into_inner()
}

/// In the program itself, and in the process that the command line reads with.
#[test]
fn hugging_faces_parquet_is_read_with_its_class_names() {
    let dir = tempdir().unwrap();
    let data = dir.path().join("set");
    let some = |from: u8, n: u8| (from..from + n).map(|i| (png(8, i), i64::from(i % 2))).collect::<Vec<_>>();
    rows(&data.join("data/train-00000-of-00002.parquet"), "label", &some(0, 20), &["cold", "warm"]);
    rows(&data.join("data/train-00001-of-00002.parquet"), "label", &some(20, 20), &["cold", "warm"]);
    rows(&data.join("data/test-00000-of-00001.parquet"), "label", &some(100, 4), &["cold", "warm"]);
    let sets = images::open(&data, None, 8, 0.0).unwrap();
    assert_eq!(
        (sets.train.len(), sets.val.labels.as_slice(), sets.train.classes.join(" ")),
        (40, &[0u16, 1, 0, 1][..], "cold warm".into())
    );
    let expected: Vec<u8> = (0..192).map(|i| [33, i % 8, i / 8 % 8][i as usize / 64]).collect();
    assert_eq!(sets.train.item(33), (&expected[..], 1));
    assert_eq!((images::side(&data).unwrap(), images::classes(&data).unwrap()), (Some(8), 2));
    // A tenth is held out (pictures 9, 29, 31 and 38), unless there is a validation split.
    let held = images::open(&data, None, 8, 0.1).unwrap();
    assert_eq!((held.val.item(0), held.val.len(), held.test.map(|t| t.len())), (sets.train.item(9), 4, Some(4)));
    let seen: Value = serde_json::from_str(&kiln(["data", "inspect", &text(&data), "--json"]).ok().out).unwrap();
    assert_eq!((&seen["format"], &seen["size"], &seen["classes"][1]["name"]), (&"parquet".into(), &8.into(), &"warm".into()));
    assert_eq!(seen["train"]["fingerprint"], held.train.fingerprint(), "as this process reads it");
    rows(&data.join("data/validation-00000-of-00001.parquet"), "label", &some(50, 2), &["cold", "warm"]);
    let sets = images::open(&data, None, 8, 0.1).unwrap();
    assert_eq!((sets.train.len(), sets.val.len(), sets.test.unwrap().len()), (40, 2, 4));

    // Without names, numbers; resized to what is asked for.
    let plain = dir.path().join("plain");
    rows(&plain.join("0000.parquet"), "fine_label", &some(0, 40), &[]);
    let sets = images::open(&plain, None, 4, 0.1).unwrap();
    assert_eq!((sets.train.classes.join(" "), sets.train.size, sets.val.len()), ("0 1".into(), 4, 4));
}

#[test]
fn parquet_that_holds_no_such_pictures_is_refused() {
    let dir = tempdir().unwrap();
    let good = (0..12u8).map(|i| (png(8, i), 0)).collect::<Vec<_>>();
    let with = |at: usize, row: (Vec<u8>, i64)| {
        let mut all = good.clone();
        all[at] = row;
        all
    };
    type Case<'a> = (&'a str, &'a [(Vec<u8>, i64)], &'a str, &'a [&'a str]);
    let cases: &[Case] = &[
        ("label", &with(3, (png(8, 3)[..40].to_vec(), 0)), "train.parquet", &["row 4 is not a readable picture"]),
        ("label", &with(3, (b"GIF89a".to_vec(), 0)), "train.parquet", &["row 4 is not a readable picture"]),
        ("label", &with(5, (png(8, 3), 2)), "train.parquet", &["row 6 has the label 2, which must be below 2"]),
        ("label", &with(5, (png(8, 3), -1)), "train.parquet", &["row 6", "no number from 0 to 65535"]),
        ("kind", &good, "train.parquet", &["no column of labels (label, labels, fine_label) among [\"img\", \"kind\"]"]),
        ("label", &good, "test.parquet", &["no parquet file to learn from"]),
    ];
    let mut problems = vec![];
    for (i, (label, pictures, name, parts)) in cases.iter().enumerate() {
        let data = dir.path().join(i.to_string());
        rows(&data.join(name), label, pictures, &["cold", "warm"]);
        problems.extend(kiln(["data", "inspect", &text(&data)]).problem(parts));
    }
    // Cut short, damaged, and what claims to be long.
    let data = dir.path().join("cut");
    rows(&data.join("train.parquet"), "label", &good, &["cold", "warm"]);
    let path = data.join("train.parquet");
    let whole = fs::read(&path).unwrap();
    for cut in [whole.len() - 9, whole.len() / 2, 6] {
        fs::write(&path, &whole[..cut]).unwrap();
        problems.extend(kiln(["data", "inspect", &text(&data)]).problem(&["train.parquet", "not a readable parquet file"]));
    }
    let mut claims = whole.clone();
    let at = claims.len() - 8;
    claims[at..at + 4].copy_from_slice(&[0xff; 4]);
    fs::write(&path, claims).unwrap();
    problems.extend(kiln(["data", "inspect", &text(&data)]).problem(&["train.parquet", "not a readable parquet file"]));
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Checkpoints are chosen by pictures that were held out; the test split is read by `kiln eval --split test` alone.
#[test]
fn the_test_split_is_left_for_the_end() {
    let dir = tempdir().unwrap();
    let (data, out) = (dir.path().join("set"), dir.path().join("run"));
    let some = |from: u8, n: u8| (from..from + n).map(|i| (png(8, i), i64::from(i % 2))).collect::<Vec<_>>();
    rows(&data.join("train-0.parquet"), "label", &some(0, 40), &["cold", "warm"]);
    rows(&data.join("test-0.parquet"), "label", &some(100, 7), &["cold", "warm"]);
    let sets = "--set patch=2 --set dim=16 --set heads=2 --set multiplier=4 --set loops=1 --set batch=4 --set eval_batch=3 --threads 1";
    let (from, to) = (text(&data), text(&out));
    let said = kiln(format!("train vision_bdh --data {from} --out {to} --steps 9 {sets}").split_whitespace()).ok().out;
    assert!(said.contains(&format!("eval {to} --best --split test")), "{said}");
    let found = |more: &[&str]| -> Value {
        let all = [&["eval", &to, "--json", "--threads", "1"][..], more].concat();
        serde_json::from_str(&kiln(all).ok().out).unwrap()
    };
    let (val, test) = (found(&[]), found(&["--split", "test"]));
    assert_eq!((val["of_batches"].as_u64(), test["of_batches"].as_u64()), (Some(2), Some(3)), "4 and 7 pictures, 3 at a time");
    assert_eq!((&val["split"], &test["split"]), (&"val".into(), &"test".into()));
    assert!(val["loss"] != test["loss"] && test["accuracy"].is_number());
    // Where the test split validates, there is none.
    let plain = dir.path().join("plain");
    let to = text(&plain);
    let said =
        kiln(format!("train vision_bdh --data {from} --out {to} --steps 1 --set data.val_share=0 {sets}").split_whitespace()).ok().out;
    assert!(!said.contains("--split test"), "{said}");
    kiln(["eval", &to, "--split", "test", "--threads", "1"]).fails(&["no test split"]);
}
