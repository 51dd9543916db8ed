//! Philox4x32-10, a counter-based random number generator: any draw can be repeated from its counter and key, on CPU and GPU.

use rayon::prelude::*;

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Four random 32-bit words for a counter and a key.
#[inline(always)]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for _ in 0..10 {
        let a = MULTIPLIER[0] as u64 * c[0] as u64;
        let b = MULTIPLIER[1] as u64 * c[2] as u64;
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

/// A random word as a number in [0, 1): 24 bits, exact in f32.
#[inline(always)]
pub fn uniform(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// The feed `rng`, i32 `[4]`, that a graph's draws depend on: seed (two words), step, micro-batch.
pub fn rng_feed(seed: u64, step: u64, micro_batch: u32) -> [i32; 4] {
    [seed as i32, (seed >> 32) as i32, step as i32, micro_batch as i32]
}

/// The four words of block number `block` of a site.
#[inline(always)]
pub fn random_words(rng: &[i32], site: u32, block: u64) -> [u32; 4] {
    // The counter's words: draw, site, step, micro-batch with the draw's upper half.
    let micro_batch = crate::mutant!("draws-ignore-the-micro-batch", rng[3] as u32, 0);
    let counter = [
        block as u32,
        crate::mutant!("draws-ignore-the-site", site, 0),
        crate::mutant!("draws-ignore-the-step", rng[2] as u32, 0),
        micro_batch ^ ((block >> 32) as u32) << 16,
    ];
    philox(counter, crate::mutant!("draws-ignore-the-seed", [rng[0] as u32, rng[1] as u32], [0; 2]))
}

/// Uniform draws number `start..start + out.len()` of a site.
#[inline(always)]
pub fn fill_uniform(rng: &[i32], site: u32, start: usize, out: &mut [f32]) {
    let mut i = 0;
    while i < out.len() {
        let words = random_words(rng, site, ((start + i) / 4) as u64);
        for &word in &words[(start + i) % 4..] {
            if i < out.len() {
                out[i] = uniform(word);
                i += 1;
            }
        }
    }
}

/// Draws of 16 bits, number `start..start + out.len()` of a site: eight to a block.
#[inline(always)]
pub fn fill_halves(rng: &[i32], site: u32, start: usize, out: &mut [f32]) {
    let mut i = 0;
    while i < out.len() {
        let words = random_words(rng, site, ((start + i) / 8) as u64);
        let first = (start + i) % 8;
        for (j, o) in (first..8).zip(&mut out[i..]) {
            *o = (words[j / 2] >> (16 * (j % 2)) & 0xffff) as f32 * (1.0 / 65_536.0);
        }
        i += 8 - first;
    }
}

/// Standard normal draws for initial values. Each `stream`, made from a state's name, has counters of its own.
pub fn fill_normal(seed: u64, stream: u64, out: &mut [f32]) {
    const PIECE: usize = 1 << 14;
    out.par_chunks_mut(PIECE).enumerate().for_each(|(i, piece)| normals(seed, stream, i * PIECE / 4, piece));
}

/// The draws from counter `first` on.
fn normals(seed: u64, stream: u64, first: usize, out: &mut [f32]) {
    let key = [seed as u32, (seed >> 32) as u32];
    for (block, four) in (first..).zip(out.chunks_mut(4)) {
        let w = philox([block as u32, (block as u64 >> 32) as u32, stream as u32, (stream >> 32) as u32], key);
        for (pair, two) in four.chunks_mut(2).enumerate() {
            // Box-Muller, in f64 so that the tails do not depend on a library's f32 logarithm.
            let u = (w[2 * pair] as f64 + 0.5) / 4_294_967_296.0;
            let angle = w[2 * pair + 1] as f64 / 4_294_967_296.0 * std::f64::consts::TAU;
            let radius = (-2.0 * u.ln()).sqrt();
            for (v, z) in two.iter_mut().zip([radius * angle.cos(), radius * angle.sin()]) {
                *v = z as f32;
            }
        }
    }
}

/// A stable number for a name (FNV-1a).
pub fn hash_name(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ b as u64).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // The vectors published with the generator.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([!0; 4], [!0; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    }

    #[test]
    fn a_draw_does_not_depend_on_where_the_chunk_starts() {
        let rng = rng_feed(7, 3, 1);
        let mut all = [0.0; 40];
        fill_uniform(&rng, 5, 0, &mut all);
        let mut part = [0.0; 13];
        fill_uniform(&rng, 5, 9, &mut part);
        assert_eq!(part, all[9..22]);
        let mut other = [0.0; 40];
        fill_uniform(&rng_feed(7, 4, 1), 5, 0, &mut other);
        assert_ne!(all, other);
    }

    #[test]
    fn a_draw_depends_on_every_part_of_its_key() {
        let draw =
            |seed: u64, step: u64, micro_batch: u32, site: u32, block: u64| random_words(&rng_feed(seed, step, micro_batch), site, block);
        let all = [
            draw(7, 3, 1, 5, 9),
            draw(8, 3, 1, 5, 9),
            draw(7 + (1 << 32), 3, 1, 5, 9),
            draw(7, 4, 1, 5, 9),
            draw(7, 3, 2, 5, 9),
            draw(7, 3, 1, 6, 9),
            draw(7, 3, 1, 5, 10),
            draw(7, 3, 1, 5, 9 + (1 << 32)),
        ];
        assert_eq!(all.iter().collect::<std::collections::HashSet<_>>().len(), all.len());
    }

    #[test]
    fn normals_have_unit_variance() {
        let mut x = vec![0.0; 100_000];
        fill_normal(1, 2, &mut x);
        let mut apart = vec![0.0; 100_000];
        normals(1, 2, 0, &mut apart);
        assert!(x == apart, "threads change nothing");
        let mean = x.iter().map(|&v| v as f64).sum::<f64>() / x.len() as f64;
        let var = x.iter().map(|&v| (v as f64 - mean).powi(2)).sum::<f64>() / x.len() as f64;
        assert!(mean.abs() < 0.01 && (var - 1.0).abs() < 0.02, "mean {mean}, variance {var}");
    }
}
