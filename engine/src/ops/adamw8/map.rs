//! 8-bit block-wise quantization with dynamic maps (Dettmers et al., "8-bit Optimizers via Block-wise Quantization").
//!
//! A block of 256 numbers is divided by its absolute maximum, which is kept in f32; each quotient becomes the nearest number of a map of 256. A
//! byte of a dynamic map has, where it is signed, a sign bit; then zeros, as many as the exponent of ten; a one; and in all bits that are left a
//! linear fraction of [0.1, 1]. So the largest numbers have the most bits of fraction, and the smallest that is not 0 is about 1e-7 of the maximum.

use std::sync::LazyLock;

/// Numbers that share a maximum.
pub const BLOCK: usize = 256;

/// Powers of ten that a map reaches: from 1e-6 to 1.
const DECADES: u32 = 7;

/// The numbers that bytes stand for. Byte 0 is 0 in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Map {
    /// -0.993 to 1: a byte up to 128 is the magnitude of that rank, one above it the negative of rank 256 - byte.
    Signed,
    /// 0 to 1, for squares: a byte is the rank itself.
    Unsigned,
}

/// What is computed of a map once.
pub(super) struct Tables {
    /// The number of each byte.
    pub(super) numbers: [f32; 256],
    /// Half-way from each rank's magnitude to the next, and infinity behind the last: a magnitude above it has a higher rank.
    pub(super) middles: [f32; 256],
    /// For the magnitudes that share their upper 16 bits, the lowest rank among them. They lie so close that there is at most one more.
    pub(super) cells: Vec<u8>,
}

/// The upper 16 bits of 2^-23, which is below half of the smallest magnitude, and of 1.
pub(super) const FIRST: u32 = (127 - 23) << 7;
pub(super) const LAST: u32 = 127 << 7;
/// Cells of a map.
pub(super) const CELLS: usize = (LAST - FIRST + 1) as usize;

static SIGNED: LazyLock<Tables> = LazyLock::new(|| Tables::new(Map::Signed));
static UNSIGNED: LazyLock<Tables> = LazyLock::new(|| Tables::new(Map::Unsigned));

impl Tables {
    fn new(map: Map) -> Tables {
        let ranks = map.magnitudes();
        let mut numbers = [0.0; 256];
        for (byte, number) in numbers.iter_mut().enumerate() {
            *number = if byte < ranks.len() { ranks[byte] } else { -ranks[256 - byte] };
        }
        let mut middles = [f32::INFINITY; 256];
        for (middle, two) in middles.iter_mut().zip(ranks.windows(2)) {
            *middle = ((two[0] as f64 + two[1] as f64) / 2.0) as f32;
        }
        let lowest = |cell: u32| middles.partition_point(|&m| m < f32::from_bits(cell << 16)) as u8;
        Tables { numbers, middles, cells: (FIRST..=LAST).map(lowest).collect() }
    }
}

impl Map {
    pub(super) fn tables(self) -> &'static Tables {
        match self {
            Map::Signed => &SIGNED,
            Map::Unsigned => &UNSIGNED,
        }
    }

    /// The magnitudes of a map, ascending: 0, the midpoints of equal parts of [0.1, 1] times each power of ten, and 1.
    fn magnitudes(self) -> Vec<f32> {
        let mut all = vec![0.0];
        for decade in 0..DECADES {
            let parts = 1usize << (decade + (self == Map::Unsigned) as u32);
            let edge = |j: usize| (0.1 + 0.9 * j as f64 / parts as f64) as f32;
            let scale = 10f64.powi(decade as i32 - (DECADES as i32 - 1));
            all.extend((0..parts).map(|j| (scale * ((edge(j) + edge(j + 1)) / 2.0) as f64) as f32));
        }
        all.push(1.0);
        all
    }

    /// The number that each byte stands for.
    pub fn numbers(self) -> &'static [f32; 256] {
        &self.tables().numbers
    }

    /// What stands behind the name of a state that is kept in this map.
    fn suffix(self) -> &'static str {
        match self {
            Map::Signed => ".signed8",
            Map::Unsigned => ".unsigned8",
        }
    }

    /// Names of the states that hold a quantized state: its bytes, and the maxima of its blocks.
    pub fn names(self, state: &str) -> [String; 2] {
        let bytes = format!("{state}{}", self.suffix());
        [bytes.clone(), bytes + ".absmax"]
    }

    /// The map of a state's bytes and the state's own name, if this is the name of such bytes.
    pub fn of_bytes(name: &str) -> Option<(Map, &str)> {
        [Map::Signed, Map::Unsigned].into_iter().find_map(|map| Some((map, name.strip_suffix(map.suffix())?)))
    }

    /// Whether this is the name of the maxima of a quantized state.
    pub fn is_absmax(name: &str) -> bool {
        name.strip_suffix(".absmax").and_then(Map::of_bytes).is_some()
    }

    /// Quantizes one block and returns its maximum. The nearest number; of two as near, that of the smaller magnitude. A square that is not 0 does not
    /// become 0, since Adam divides by it.
    #[inline(always)]
    pub(super) fn pack(self, tables: &Tables, block: &[f32], bytes: &mut [u8]) -> f32 {
        // A NaN wins, so that it is seen.
        let most = block.iter().fold(0.0f32, |most, v| if v.abs() > most || v.is_nan() { v.abs() } else { most });
        let inverse = if most >= f32::MIN_POSITIVE { 1.0 / most } else { 0.0 };
        for (byte, &v) in bytes.iter_mut().zip(block) {
            let x = v.abs() * inverse;
            let cell = (x.to_bits() >> 16).clamp(FIRST, LAST) - FIRST;
            let rank = tables.cells[cell as usize];
            let rank = rank + (x > tables.middles[rank as usize]) as u8;
            *byte = match self {
                Map::Signed if v < 0.0 => rank.min(127).wrapping_neg(),
                Map::Signed => rank,
                Map::Unsigned => rank.max(crate::mutant!("second-moment-becomes-zero", (v > 0.0) as u8, 0)),
            };
        }
        most
    }

    /// Quantizes a tensor: a byte for each number, and a maximum for each block.
    pub fn quantized(self, numbers: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut bytes = vec![0; numbers.len()];
        let most =
            numbers.chunks(BLOCK).zip(bytes.chunks_mut(BLOCK)).map(|(block, bytes)| self.pack(self.tables(), block, bytes)).collect();
        (bytes, most)
    }

    /// The numbers of a quantized tensor.
    pub fn dequantized(self, bytes: &[u8], absmax: &[f32]) -> Vec<f32> {
        bytes.iter().enumerate().map(|(i, &b)| self.numbers()[b as usize] * absmax[i / BLOCK]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::fill_normal;

    const BOTH: [Map; 2] = [Map::Signed, Map::Unsigned];

    #[test]
    fn a_map_has_256_numbers_and_its_gaps_are_those_of_its_decades() {
        for map in BOTH {
            let mut all = map.numbers().to_vec();
            assert_eq!(all[0], 0.0);
            all.sort_by(f32::total_cmp);
            assert!(all.windows(2).all(|w| w[0] < w[1]), "{map:?}");
            assert_eq!(*all.last().unwrap(), 1.0);
            let parts = if map == Map::Signed { 64.0 } else { 128.0 };
            // The widest gaps are those between 0.1 and 1.
            let widest = all.windows(2).map(|w| w[1] - w[0]).fold(0.0, f32::max);
            assert!((widest - 0.9 / parts).abs() < 1e-6, "{map:?}: {widest}");
            let smallest = all.iter().copied().find(|v| *v > 0.0).unwrap();
            let first = if map == Map::Signed { 0.55e-6 } else { 0.325e-6 };
            assert!((smallest / first - 1.0).abs() < 1e-6, "{map:?}: {smallest}");
        }
        // A byte has no room for -1 beside 1: the most negative is the last midpoint.
        let least = Map::Signed.numbers().iter().copied().fold(0.0, f32::min);
        assert!((least + 0.99296875).abs() < 1e-7, "{least}");
        for (rank, &v) in Map::Signed.numbers().iter().enumerate().take(128).skip(1) {
            assert_eq!(Map::Signed.numbers()[256 - rank], -v);
        }
    }

    /// Against a search through all 256, for magnitudes around every middle and every cell's edge, and at random.
    #[test]
    fn a_byte_is_the_nearest_number() {
        for map in BOTH {
            let edges = (FIRST - 3..=LAST).map(|cell| f32::from_bits(cell << 16));
            let middles = map.tables().middles.iter().copied().filter(|m| m.is_finite());
            let mut tried: Vec<f32> = middles.chain(edges).flat_map(|v| [v.next_down(), v, v.next_up()]).filter(|v| *v <= 1.0).collect();
            let mut random = vec![0.0; 20_000];
            fill_normal(3, 1, &mut random);
            tried.extend(random.iter().map(|v| (v * 3.0).exp().min(1.0)).chain([0.0, 1e-20, 1e-7]));
            for x in tried {
                for v in if map == Map::Signed { vec![x, -x] } else { vec![x] } {
                    // The maximum of the block is 1.
                    let mut bytes = [0; 2];
                    assert_eq!(map.pack(map.tables(), &[v, 1.0], &mut bytes), 1.0);
                    let far = |byte: u8| (map.numbers()[byte as usize] as f64 - v as f64).abs();
                    let nearest = (0..=255).map(far).fold(f64::INFINITY, f64::min);
                    // A middle that is rounded to f32 may be off by that rounding, to either side.
                    let kept = map == Map::Unsigned && v > 0.0 && bytes[0] == 1;
                    assert!(
                        kept || far(bytes[0]) <= nearest + 1.2e-7 * x as f64,
                        "{map:?}: {v} becomes {}",
                        map.numbers()[bytes[0] as usize]
                    );
                }
            }
        }
    }

    #[test]
    fn numbers_of_any_size_come_back_within_the_gaps_of_the_map() {
        for (n, scale) in [(1, 1.0), (255, 1e-12), (256, 3e7), (257, 1e-30), (4099, 1e-3)] {
            let mut normal = vec![0.0; n];
            fill_normal(7, n as u64, &mut normal);
            for map in BOTH {
                let numbers: Vec<f32> = normal.iter().map(|v| if map == Map::Signed { v * scale } else { v * v * scale }).collect();
                let (bytes, most) = map.quantized(&numbers);
                assert_eq!((bytes.len(), most.len()), (n, n.div_ceil(BLOCK)));
                let back = map.dequantized(&bytes, &most);
                let gap = 0.9 / if map == Map::Signed { 64.0 } else { 128.0 };
                for (i, (a, b)) in numbers.iter().zip(&back).enumerate() {
                    let largest = numbers[i / BLOCK * BLOCK..].iter().take(BLOCK).fold(0.0f32, |m, v| m.max(v.abs()));
                    // Half of a gap of its decade; that of the maximum itself if it is negative.
                    let x = a.abs() / largest;
                    let decade = 10f32.powf((x * 1.2).max(1e-6).log10().ceil().min(0.0));
                    let finer = decade.log10().round().exp2().min(1.0);
                    let allowed = largest * (gap * decade / finer / 2.0 * 1.01 + 4e-7);
                    assert!((a - b).abs() <= allowed, "{map:?} {n}: {a} came back as {b}, {allowed} is allowed");
                }
                // What was quantized once stays as it is.
                let again = map.quantized(&back);
                assert!(again.1.iter().zip(&most).all(|(a, b)| (a / b - 1.0).abs() < 0.008), "{map:?} {n}");
                if map == Map::Unsigned {
                    assert_eq!((again.0, again.1), (bytes, most), "{n}");
                }
            }
        }
    }

    #[test]
    fn zeros_stay_zeros_a_small_square_does_not_become_one_and_a_nan_is_seen() {
        assert_eq!(Map::Signed.quantized(&[0.0; 300]), (vec![0; 300], vec![0.0; 2]));
        assert_eq!(Map::Unsigned.dequantized(&[0; 300], &[0.0; 2]), [0.0; 300]);
        // So small that 1 / it is no number.
        let tiny = f32::from_bits(3);
        assert_eq!(Map::Signed.quantized(&[tiny, -tiny]), (vec![0, 0], vec![tiny]));
        let (bytes, most) = Map::Unsigned.quantized(&[1.0, 1e-12, 0.0]);
        assert_eq!(bytes, [255, 1, 0]);
        assert!(Map::Unsigned.dequantized(&bytes, &most)[1] > 0.0);
        assert!(Map::Signed.quantized(&[1.0, f32::NAN, 2.0]).1[0].is_nan());
    }

    #[test]
    fn names_say_the_map() {
        let [bytes, absmax] = Map::Unsigned.names("adam.v/w");
        assert_eq!((Map::of_bytes(&bytes), Map::of_bytes(&absmax)), (Some((Map::Unsigned, "adam.v/w")), None));
        assert!(Map::is_absmax(&absmax) && !Map::is_absmax(&bytes) && !Map::is_absmax("w.absmax"));
        assert_eq!(Map::of_bytes("adam.v/w"), None);
    }
}
