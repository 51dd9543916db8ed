//! How values are divided among ranks: what an op says about itself, and which part of a state a rank has.

use crate::graph::Graph;
use crate::meta::Meta;
use std::collections::BTreeMap;

/// A way to divide an op's work: one dimension that some of its inputs and outputs have, cut into equal parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// What a rank needs of every input.
    pub x: Vec<Share>,
    /// What a rank then has of every output.
    pub y: Vec<Share>,
}

/// What a rank has of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Share {
    /// All of it, the same on every rank.
    Whole,
    /// A part of this dimension.
    Dim(usize),
    /// Of a dimension that consists of so many equal sections, the same part of every section, one after the other. The columns of a weight that makes queries, keys
    /// and values at once are three sections: a part of each is a set of heads.
    Sections(usize, usize),
    /// A term: the value is the sum over all ranks.
    Sum,
    /// Rows that are in no other rank, in an order of the rank's own. Nobody can put them together.
    Own,
}

impl Share {
    /// The dimension of which it is a part, and how many sections that has; None if it is no part.
    pub fn cut(self) -> Option<(usize, usize)> {
        match self {
            Share::Dim(axis) => Some((axis, 1)),
            Share::Sections(axis, sections) => Some((axis, sections)),
            Share::Whole | Share::Sum | Share::Own => None,
        }
    }

    /// The same part of every one of these sections, where it is a part of a dimension.
    pub fn of_each(self, sections: usize) -> Share {
        match self {
            Share::Dim(axis) if sections > 1 => Share::Sections(axis, sections),
            other => other,
        }
    }
}

impl Axis {
    /// An axis with these shares of the inputs and outputs.
    pub fn new(x: impl Into<Vec<Share>>, y: impl Into<Vec<Share>>) -> Axis {
        Axis { x: x.into(), y: y.into() }
    }

    /// The first dimension of these inputs (`Some`) and of all outputs; the other inputs are needed as a whole.
    pub fn first(split: &[bool], outputs: usize) -> Axis {
        let x: Vec<Share> = split.iter().map(|&s| if s { Share::Dim(0) } else { Share::Whole }).collect();
        Axis::new(x, vec![Share::Dim(0); outputs])
    }
}

/// Which part of a feed or a state a rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The shape of the whole.
    pub shape: Vec<usize>,
    /// The dimension that is cut; None: the elements in a row.
    pub axis: Option<usize>,
    /// How many equal sections that dimension has, each of which is cut (see [`Share::Sections`]); mostly 1.
    pub sections: usize,
    /// Which part it is.
    pub index: usize,
    /// How many parts there are.
    pub of: usize,
    /// The group of ranks that have the parts.
    pub by: &'static str,
}

impl Part {
    /// The shape of the part.
    pub fn own_shape(&self) -> Vec<usize> {
        match self.axis {
            None => vec![self.shape.iter().product::<usize>() / self.of],
            Some(axis) => self.shape.iter().enumerate().map(|(d, &n)| if d == axis { n / self.of } else { n }).collect(),
        }
    }

    /// Pieces of the whole that the part consists of: where each begins, in bytes of `whole`, and the length of all.
    fn pieces(&self, whole: usize) -> (impl Iterator<Item = usize>, usize) {
        let outer: usize = self.sections * self.axis.map_or(1, |axis| self.shape[..axis].iter().product());
        let (row, piece, index) = (whole / outer, whole / outer / self.of, self.index);
        ((0..outer).map(move |o| o * row + index * piece), piece)
    }

    /// The part's bytes, given those of the whole.
    pub fn cut(&self, whole: &[u8]) -> Vec<u8> {
        let (starts, piece) = self.pieces(whole.len());
        starts.flat_map(|at| whole[at..at + piece].iter().copied()).collect()
    }

    /// The same of a whole whose first dimension is cut, where they lie.
    pub fn rows<'a>(&self, whole: &'a [u8]) -> &'a [u8] {
        let own = whole.len() / self.of;
        &whole[self.index * own..][..own]
    }

    /// Puts the part's bytes in their place in the whole.
    pub fn put(&self, part: &[u8], whole: &mut [u8]) {
        let (starts, piece) = self.pieces(whole.len());
        starts.zip(part.chunks(piece.max(1))).for_each(|(at, from)| whole[at..at + piece].copy_from_slice(from));
    }
}

/// Feeds and states of which a rank has a part only, by name. A part may be cut again: the last is what the rank has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parts {
    /// Of a feed, whose first dimension is cut.
    pub feeds: BTreeMap<String, Vec<Part>>,
    /// Of a state.
    pub states: BTreeMap<String, Vec<Part>>,
}

impl Parts {
    /// All feeds of a graph by name, and which part of each a rank has; of a whole one, none.
    pub fn of_feeds(&self, g: &Graph) -> BTreeMap<String, Vec<Part>> {
        g.feeds().map(|(name, _)| (name.to_string(), self.feeds.get(name).cloned().unwrap_or_default())).collect()
    }
}

/// The bytes of a rank's part.
pub fn cut(parts: &[Part], whole: Vec<u8>) -> Vec<u8> {
    parts.iter().fold(whole, |whole, part| part.cut(&whole))
}

/// Shape and type of the whole that `meta` is a part of.
pub fn whole(parts: &[Part], meta: &Meta) -> Meta {
    parts.first().map_or(meta.clone(), |p| meta.with(&p.shape))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Data;
    use crate::meta::DType;

    #[test]
    fn parts_make_up_the_whole() {
        let whole: Vec<u8> = (0..48).collect();
        for (axis, sections) in [(None, 1), (Some(0), 1), (Some(1), 1), (Some(2), 1), (Some(1), 2), (Some(2), 3)] {
            let parts = [0, 1].map(|index| Part { shape: vec![2, 4, 6], axis, sections, index, of: 2, by: "data" });
            let mut back = vec![0; 48];
            for part in &parts {
                let own = part.cut(&whole);
                assert_eq!(own.len(), part.own_shape().iter().product::<usize>());
                part.put(&own, &mut back);
            }
            assert_eq!(back, whole, "{axis:?} in {sections} sections");
        }
        let middle = Part { shape: vec![2, 4, 6], axis: Some(1), sections: 1, index: 1, of: 2, by: "data" };
        assert_eq!(middle.cut(&whole)[..3], [12, 13, 14]);
        let sections = Part { shape: vec![2, 24], axis: Some(1), sections: 3, index: 1, of: 2, by: "tensor" };
        assert_eq!(sections.cut(&whole)[..12], [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]);
        assert_eq!(
            cut(&[middle, Part { shape: vec![2, 2, 6], axis: Some(0), sections: 1, index: 1, of: 2, by: "data" }], whole)[..2],
            [36, 37]
        );
    }

    #[test]
    fn feeds_are_cut_by_rows_and_others_stay() {
        let part = Part { shape: vec![4, 2], axis: Some(0), sections: 1, index: 1, of: 2, by: "data" };
        let parts = Parts { feeds: [("x".to_string(), vec![part])].into(), ..Parts::default() };
        let feeds = [("x", Data::I32(&[0, 1, 2, 3, 4, 5, 6, 7])), ("rate", Data::F32(&[0.5]))];
        let own = Data::checked("x", &Meta::new(&[2, 2], DType::I32), &parts, &feeds).unwrap();
        assert_eq!(bytemuck::cast_slice::<u8, i32>(own), [4, 5, 6, 7]);
        assert_eq!(Data::checked("rate", &Meta::f32(&[1]), &parts, &feeds).unwrap(), 0.5f32.to_le_bytes());
        let few = Data::checked("x", &Meta::new(&[2, 2], DType::I32), &parts, &[("x", Data::I32(&[0; 4]))]).unwrap_err();
        assert!(few.to_string().contains("i32[4, 2]"), "{few}");
    }
}
