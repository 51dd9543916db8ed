//! Running text in windows that share nothing: the first tokens are the source, and the decoder writes those that follow.

use super::super::source::check_range;
use super::super::{DataError, Item, ShardSet, Source};
use super::Frame;

/// Window i begins at `i * (source + seq)`.
pub struct Windows {
    set: ShardSet,
    frame: Frame,
}

impl Windows {
    pub fn new(set: ShardSet, frame: Frame) -> Result<Windows, DataError> {
        frame.check()?;
        if set.tokens() < frame.len() as u64 {
            let what = format!("the {} split of {}", set.split().name(), set.dir().display());
            return Err(DataError::TooFew { what, tokens: set.tokens(), needed: frame.len() as u64 });
        }
        Ok(Windows { set, frame })
    }
}

impl Source for Windows {
    fn len(&self) -> u64 {
        self.set.tokens() / self.frame.len() as u64
    }

    fn item(&self, i: u64) -> Result<Item, DataError> {
        check_range(i, self.len())?;
        let start = i * self.frame.len() as u64;
        let tokens = self.set.get(start..start + self.frame.len() as u64)?;
        let (source, reply) = tokens.split_at(self.frame.source);
        Ok(self.frame.pair(source, reply))
    }

    fn counted(&self) -> Option<usize> {
        self.frame.ignore.is_empty().then_some(self.frame.seq)
    }

    /// That of a data set is a mean over all tokens, of which the sources are not written.
    fn entropy_floor(&self) -> Option<f64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Split;

    #[test]
    fn windows_lie_behind_one_another_and_cross_shards() {
        let dir = tempfile::tempdir().unwrap();
        crate::data::dataset::tests::write_set(dir.path(), 23, 4);
        let windows = |source, seq, begin, ignore: &[u32]| {
            let set = ShardSet::open(dir.path(), Split::Train).unwrap();
            Windows::new(set, Frame { source, seq, begin, ignore: ignore.to_vec() })
        };
        let source = windows(3, 2, None, &[8]).unwrap();
        assert_eq!((source.len(), source.counted()), (4, None));
        let item = source.item(1).unwrap();
        // The reference's `window` of 5..10: the source 5, 6, 7; the decoder reads 7, 8 and writes 8, 9.
        assert_eq!(item.ids, [5, 6, 7, 7, 8]);
        assert_eq!(item.targets, [-1, -1, -1, -1, 9], "8 is not trained on");
        assert!(item.until.is_empty());
        let source = windows(3, 2, Some(99), &[]).unwrap();
        assert_eq!(source.item(3).unwrap().ids, [15, 16, 17, 99, 18]);
        assert_eq!(source.counted(), Some(2));
        assert!(source.item(4).is_err());
        assert_eq!(windows(11, 12, None, &[]).unwrap().len(), 1);
        let error = windows(12, 12, None, &[]).err().unwrap().to_string();
        assert!(error.contains("has 23 tokens, a window needs 24"), "{error}");
        assert!(windows(0, 2, None, &[]).is_err() && windows(2, 0, None, &[]).is_err());
    }
}
