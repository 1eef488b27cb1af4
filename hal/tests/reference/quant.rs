//! Block formats, against encoders that write each field where the format's description puts it.

use half::f16;
use zofo_hal::DType;
use zofo_hal::quant::dequantise_row;

fn row(dtype: DType, bytes: &[u8], n: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; n];
    dequantise_row(dtype, bytes, &mut out).unwrap();
    out
}

fn half(x: f32) -> [u8; 2] {
    f16::from_f32(x).to_le_bytes()
}

/// Numbers below `below` that touch every value and every place.
fn codes(n: usize, below: u32) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 7 + i / 5 + 3) % below).collect()
}

#[test]
fn plain_floats() {
    assert_eq!(row(DType::F32, &[1.5f32.to_le_bytes(), (-0.25f32).to_le_bytes()].concat(), 2), [1.5, -0.25]);
    assert_eq!(row(DType::F16, &[half(1.5), half(65504.0)].concat(), 2), [1.5, 65504.0]);
    assert_eq!(row(DType::Bf16, &[0x80, 0x3F, 0x00, 0xC0], 2), [1.0, -2.0]);
}

#[test]
fn q8_0_is_scale_times_byte() {
    let q: Vec<i8> = (0..32).map(|i| (i * 8 - 128) as i8).collect();
    let mut bytes = half(0.5).to_vec();
    bytes.extend(q.iter().map(|q| *q as u8));
    assert_eq!(row(DType::Q8_0, &bytes, 32), q.iter().map(|q| f32::from(*q) * 0.5).collect::<Vec<_>>());
}

/// Element i in the low nibble of byte i, element i + 16 in its high nibble.
fn nibbles(codes: &[u32]) -> Vec<u8> {
    (0..16).map(|i| (codes[i] & 15 | (codes[i + 16] & 15) << 4) as u8).collect()
}

fn fifth_bits(codes: &[u32]) -> [u8; 4] {
    codes.iter().enumerate().fold(0u32, |bits, (i, c)| bits | (c >> 4) << i).to_le_bytes()
}

#[test]
fn blocks_of_32() {
    let (d, m) = (0.25, -1.5);
    let (four, five) = (codes(32, 16), codes(32, 32));
    let value = |c: &[u32], zero: f32, m: f32| -> Vec<f32> { c.iter().map(|c| (*c as f32 - zero) * d + m).collect() };
    let q4_0 = [half(d).to_vec(), nibbles(&four)].concat();
    assert_eq!(row(DType::Q4_0, &q4_0, 32), value(&four, 8.0, 0.0));
    let q4_1 = [half(d).to_vec(), half(m).to_vec(), nibbles(&four)].concat();
    assert_eq!(row(DType::Q4_1, &q4_1, 32), value(&four, 0.0, m));
    let q5_0 = [half(d).to_vec(), fifth_bits(&five).to_vec(), nibbles(&five)].concat();
    assert_eq!(row(DType::Q5_0, &q5_0, 32), value(&five, 16.0, 0.0));
    let q5_1 = [half(d).to_vec(), half(m).to_vec(), fifth_bits(&five).to_vec(), nibbles(&five)].concat();
    assert_eq!(row(DType::Q5_1, &q5_1, 32), value(&five, 0.0, m));
    // Two blocks with scales of their own.
    let two = [q4_0, half(-d).to_vec(), nibbles(&four)].concat();
    let want = [value(&four, 8.0, 0.0), value(&four, 8.0, 0.0).iter().map(|x| -x).collect()].concat();
    assert_eq!(row(DType::Q4_0, &two, 64), want);
}

/// Packs eight pairs of 6-bit numbers: bytes 0..4 and 4..8 hold scales and minimums 0..4 and, on top, bits 4 and 5 of numbers 4..8; bytes 8..12
/// hold their low four bits, scale below minimum.
fn six_bit_pairs(scales: &[u32], mins: &[u32]) -> Vec<u8> {
    let mut s = [0u32; 12];
    for j in 0..4 {
        s[j] = scales[j] | (scales[j + 4] >> 4) << 6;
        s[j + 4] = mins[j] | (mins[j + 4] >> 4) << 6;
        s[j + 8] = scales[j + 4] & 15 | (mins[j + 4] & 15) << 4;
    }
    s.iter().map(|x| *x as u8).collect()
}

#[test]
fn q4_k_super_blocks() {
    let (d, dmin) = (0.125, 0.5);
    let (scales, mins, q) = ([1, 62, 17, 33, 63, 5, 48, 20], [0, 63, 9, 40, 16, 31, 2, 55], codes(256, 16));
    let mut bytes = [half(d).to_vec(), half(dmin).to_vec(), six_bit_pairs(&scales, &mins)].concat();
    // Chunks of 64 elements in 32 bytes: the first half below, the second half above.
    bytes.extend((0..128).map(|i| (q[i / 32 * 64 + i % 32] | q[i / 32 * 64 + 32 + i % 32] << 4) as u8));
    let want: Vec<f32> = (0..256).map(|i| d * scales[i / 32] as f32 * q[i] as f32 - dmin * mins[i / 32] as f32).collect();
    assert_eq!(row(DType::Q4K, &bytes, 256), want);
}

#[test]
fn q6_k_super_blocks() {
    let d = 0.0625;
    let (scales, q) = ((0..16).map(|i| (i * 17 - 128) as i8).collect::<Vec<_>>(), codes(256, 64));
    let (mut low, mut high) = ([0u32; 128], [0u32; 64]);
    for (i, q) in q.iter().enumerate() {
        let (half, group, l) = (i / 128, i / 32 % 4, i % 32);
        // Groups 0 and 1 are low nibbles, 2 and 3 the high nibbles of the same bytes; bits 4 and 5 lie at 2 * group.
        low[64 * half + 32 * (group & 1) + l] |= (q & 15) << (4 * (group >> 1));
        high[32 * half + l] |= (q >> 4) << (2 * group);
    }
    let mut bytes: Vec<u8> = low.iter().chain(&high).map(|x| *x as u8).collect();
    bytes.extend(scales.iter().map(|s| *s as u8));
    bytes.extend(half(d));
    let want: Vec<f32> = (0..256).map(|i| d * f32::from(scales[i / 16]) * (q[i] as f32 - 32.0)).collect();
    assert_eq!(row(DType::Q6K, &bytes, 256), want);
}

#[test]
fn wrong_sizes_are_refused() {
    for dtype in DType::ALL {
        let (elements, bytes) = dtype.block();
        let run = |n: usize, b: usize| dequantise_row(dtype, &vec![0; b], &mut vec![0.0; n]);
        assert_eq!(run(elements, bytes).is_ok(), dtype != DType::U32);
        assert_eq!(run(0, 0).is_ok(), dtype != DType::U32);
        assert!(run(elements, bytes + 1).is_err());
        assert!(run(elements + 1, bytes).is_err());
        assert!(run(elements, bytes - 1).is_err());
    }
}
