//! A compact text encoding of samples, as differences between successive samples.
//!
//! Layout: a version byte, the number of cores, then for each sample a byte of flags and the values that changed, each
//! as the difference to the previous sample, in base 128 with the sign in the lowest bit; all of it in base64, because
//! columns hold text. Of times, the change of the interval is stored, so a regular one takes a byte or two. Memory and
//! disk are in units of 4 KiB, as the kernel counts them, unless a value is not a multiple.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;

/// A sample of the usage of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sample {
    /// When it was taken, in microseconds since the Unix epoch; encoded in milliseconds.
    pub(crate) at_us: i64,
    /// Cores of the sandbox.
    pub(crate) cpu_count: u32,
    /// Share of these cores used since the previous sample, in hundredths of a percent.
    pub(crate) cpu_used_centi: u32,
    /// Memory in use, in bytes.
    pub(crate) memory_used_bytes: u64,
    /// Memory limit, in bytes.
    pub(crate) memory_total_bytes: u64,
    /// Page cache, in bytes.
    pub(crate) memory_cache_bytes: u64,
    /// Disk in use, in bytes.
    pub(crate) disk_used_bytes: u64,
    /// Disk limit, in bytes.
    pub(crate) disk_total_bytes: u64,
    /// What it has received since it was created, in bytes.
    pub(crate) received_bytes: u64,
    /// What it has sent since it was created, in bytes.
    pub(crate) sent_bytes: u64,
}

/// The version of the layout.
const VERSION: u8 = 2;
/// The version before, which is the same without [`NETWORK`].
const WITHOUT_NETWORK: u8 = 1;
const PAGE: u64 = 4096;
/// Number of values after the time, each with a flag.
const VALUES: usize = 6;
/// The flag for the bytes that were received and sent, which are the last two numbers.
const NETWORK: u8 = 1 << 6;
/// The flag for memory and disk in bytes instead of pages.
const IN_BYTES: u8 = 1 << 7;

impl Sample {
    fn values(&self) -> [u64; VALUES] {
        [
            u64::from(self.cpu_used_centi),
            self.memory_used_bytes,
            self.memory_total_bytes,
            self.memory_cache_bytes,
            self.disk_used_bytes,
            self.disk_total_bytes,
        ]
    }
}

/// Encodes samples of one sandbox.
pub(super) fn encode(samples: &[Sample]) -> String {
    let mut bytes = vec![VERSION];
    write_number(
        &mut bytes,
        i64::from(samples.first().map_or(0, |sample| sample.cpu_count)),
    );
    let mut at_ms = 0;
    let mut step_ms = 0;
    let mut values = [0; VALUES];
    let mut network = [0_u64; 2];
    for sample in samples {
        let sample_ms = sample.at_us.div_euclid(1000);
        let next = sample.values();
        let unit = if next[1..].iter().chain(&values[1..]).all(|value| value % PAGE == 0) {
            PAGE
        } else {
            1
        };
        let mut flags = if unit == 1 { IN_BYTES } else { 0 };
        let mut changes = Vec::new();
        write_number(&mut changes, (sample_ms - at_ms) - step_ms);
        for (at, (next, before)) in next.iter().zip(values).enumerate() {
            if *next != before {
                flags |= 1 << at;
                let unit = if at == 0 { 1 } else { unit };
                write_number(&mut changes, (next / unit).wrapping_sub(before / unit).cast_signed());
            }
        }
        let next_network = [sample.received_bytes, sample.sent_bytes];
        if next_network != network {
            flags |= NETWORK;
            for (next, before) in next_network.iter().zip(network) {
                write_number(&mut changes, next.wrapping_sub(before).cast_signed());
            }
        }
        bytes.push(flags);
        bytes.extend(changes);
        step_ms = sample_ms - at_ms;
        at_ms = sample_ms;
        values = next;
        network = next_network;
    }
    STANDARD_NO_PAD.encode(bytes)
}

/// Decodes the output of [`encode`]; `None` for anything else.
pub(super) fn decode(text: &str) -> Option<Vec<Sample>> {
    let bytes = STANDARD_NO_PAD.decode(text).ok()?;
    let (version, mut rest) = bytes.split_first()?;
    if ![VERSION, WITHOUT_NETWORK].contains(version) {
        return None;
    }
    let cpu_count = u32::try_from(read_number(&mut rest)?).ok()?;
    let mut at_ms: i64 = 0;
    let mut step_ms: i64 = 0;
    let mut values = [0_u64; VALUES];
    let mut network = [0_u64; 2];
    let mut samples = Vec::new();
    while let Some((flags, after)) = rest.split_first() {
        rest = after;
        step_ms = step_ms.checked_add(read_number(&mut rest)?)?;
        at_ms = at_ms.checked_add(step_ms)?;
        for (at, value) in values.iter_mut().enumerate() {
            if flags & (1 << at) != 0 {
                let unit = if at == 0 || flags & IN_BYTES != 0 { 1 } else { PAGE };
                let changed = (*value / unit).wrapping_add(read_number(&mut rest)?.cast_unsigned());
                *value = changed.wrapping_mul(unit);
            }
        }
        if flags & NETWORK != 0 {
            for value in &mut network {
                *value = value.wrapping_add(read_number(&mut rest)?.cast_unsigned());
            }
        }
        let [received_bytes, sent_bytes] = network;
        let [
            cpu,
            memory_used_bytes,
            memory_total_bytes,
            memory_cache_bytes,
            disk_used_bytes,
            disk_total_bytes,
        ] = values;
        samples.push(Sample {
            at_us: at_ms.checked_mul(1000)?,
            cpu_count,
            cpu_used_centi: u32::try_from(cpu).ok()?,
            memory_used_bytes,
            memory_total_bytes,
            memory_cache_bytes,
            disk_used_bytes,
            disk_total_bytes,
            received_bytes,
            sent_bytes,
        });
    }
    Some(samples)
}

/// Appends a number as a variable-length integer; numbers close to zero take few bytes.
fn write_number(bytes: &mut Vec<u8>, number: i64) {
    let mut rest = ((number << 1) ^ (number >> 63)).cast_unsigned();
    loop {
        let low = u8::try_from(rest & 0x7f).expect("seven bits");
        rest >>= 7;
        if rest == 0 {
            bytes.push(low);
            return;
        }
        bytes.push(low | 0x80);
    }
}

fn read_number(bytes: &mut &[u8]) -> Option<i64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some((number >> 1).cast_signed() ^ -(number & 1).cast_signed());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(n: u32) -> Sample {
        Sample {
            // Irregular like a real timer.
            at_us: 1_785_000_000_000_000 + i64::from(n) * 5_000_000 + i64::from(n % 3) * 2_000,
            cpu_count: 2,
            cpu_used_centi: 12,
            memory_used_bytes: 4 << 20,
            memory_total_bytes: 1 << 30,
            memory_cache_bytes: 1 << 20,
            disk_used_bytes: 8 << 20,
            disk_total_bytes: 10 << 30,
            received_bytes: 0,
            sent_bytes: 0,
        }
    }

    #[test]
    fn samples_round_trip() {
        let check = |samples: &[Sample]| assert_eq!(decode(&encode(samples)).as_deref(), Some(samples));
        check(&[]);
        check(&[sample(0)]);
        check(&(0..100).map(sample).collect::<Vec<_>>());
        let odd = Sample {
            at_us: -5_000,
            cpu_count: u32::MAX,
            cpu_used_centi: 10_000,
            memory_used_bytes: u64::MAX,
            memory_total_bytes: 0,
            memory_cache_bytes: 1,
            disk_used_bytes: 4095,
            disk_total_bytes: 4097,
            received_bytes: u64::MAX,
            sent_bytes: 1,
        };
        let cpu_count = odd.cpu_count;
        let even = Sample { cpu_count, ..sample(5) };
        check(&[odd, even, even, odd, odd]);
        // Fractions of a millisecond are cut off.
        let fine = Sample {
            at_us: 1_999,
            ..sample(0)
        };
        assert_eq!(decode(&encode(&[fine])).expect("samples")[0].at_us, 1_000);
    }

    #[test]
    fn five_minutes_are_encoded_compactly() {
        let idle: Vec<Sample> = (0..60).map(sample).collect();
        assert!(encode(&idle).len() <= 300, "{}", encode(&idle).len());
        let busy: Vec<Sample> = (0..60_u64)
            .map(|n| Sample {
                cpu_used_centi: u32::try_from(n * 7919 % 10_000).expect("small"),
                memory_used_bytes: n * 7919 % 100_000 * PAGE,
                memory_cache_bytes: n * 104_729 % 100_000 * PAGE,
                disk_used_bytes: n * 1_299_709 % 1_000_000 * PAGE,
                received_bytes: n * 1_000_003,
                sent_bytes: n * 50_021,
                ..sample(u32::try_from(n).expect("small"))
            })
            .collect();
        assert!(encode(&busy).len() <= 1400, "{}", encode(&busy).len());
    }

    #[test]
    fn rows_of_the_version_before_have_no_network() {
        let quiet: Vec<Sample> = (0..3).map(sample).collect();
        let mut bytes = STANDARD_NO_PAD.decode(encode(&quiet)).expect("base64");
        assert_eq!(bytes[0], VERSION);
        bytes[0] = WITHOUT_NETWORK;
        assert_eq!(decode(&STANDARD_NO_PAD.encode(bytes)), Some(quiet));
    }

    #[test]
    fn damaged_text_is_rejected() {
        let text = encode(&[sample(0), sample(1)]);
        for damaged in ["", "A", "AwQ", "!", &text[..text.len() - 4], "AQT/////////////"] {
            assert_eq!(decode(damaged), None, "{damaged}");
        }
    }
}
