//! What of a host the processes in a checkpoint depend on, beyond files: the instructions that its processor has, and a CRIU
//! that can read what another one wrote.
//!
//! Programs find out once which instructions there are, and use them for good. On a processor with fewer of them (a machine
//! was moved, or its disk put into another one) they would be killed at some later time, without a reason. The release of
//! the kernel is only noted: processes run on with another one, and CRIU says so where they do not.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// Features that an error names at most.
const NAMED_MAX: usize = 4;

/// The host that wrote a checkpoint, or reads it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostFeatures {
    /// The version of CRIU.
    pub(crate) criu: String,
    /// The kernel's release.
    pub(crate) kernel: String,
    /// Instruction sets of the processor that programs may use. Empty where they are not known: on others than x86-64, and
    /// in checkpoints of earlier versions.
    #[serde(default)]
    pub(crate) processor: BTreeSet<String>,
}

impl HostFeatures {
    /// This host, with this version of CRIU.
    pub(crate) fn with(criu: &str) -> Self {
        Self {
            criu: criu.to_owned(),
            kernel: crate::kernel::release(),
            processor: instruction_sets(),
        }
    }

    /// Why processes that were written on `other` cannot be restored here.
    pub(crate) fn unfit_for(&self, other: &Self) -> Option<String> {
        let missing: Vec<&str> = other
            .processor
            .difference(&self.processor)
            .map(String::as_str)
            .collect();
        if !missing.is_empty() {
            let named = missing.iter().take(NAMED_MAX).copied().collect::<Vec<_>>().join(", ");
            let more = match missing.len().saturating_sub(NAMED_MAX) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            return Some(format!(
                "its processes may use instructions that the processor of this host does not have ({named}{more})"
            ));
        }
        let (has, wrote) = (version(&self.criu), version(&other.criu));
        (has < wrote).then(|| {
            format!(
                "its processes were written by CRIU {}, and the host has {}: install that version or a later one",
                other.criu, self.criu
            )
        })
    }
}

/// Major and minor number. Fixes do not change the format.
fn version(text: &str) -> Vec<u32> {
    let numbers = text
        .split(|c: char| !c.is_ascii_digit())
        .map_while(|part| part.parse().ok());
    numbers.take(2).collect()
}

#[cfg(target_arch = "x86_64")]
fn instruction_sets() -> BTreeSet<String> {
    macro_rules! detected {
        ($($name:tt)*) => {
            [$(($name, std::is_x86_feature_detected!($name))),*]
        };
    }
    let known = detected!(
        "adx" "aes" "avx" "avx2" "avx512bf16" "avx512bitalg" "avx512bw" "avx512cd" "avx512dq" "avx512f" "avx512fp16"
        "avx512ifma" "avx512vbmi" "avx512vbmi2" "avx512vl" "avx512vnni" "avx512vp2intersect" "avx512vpopcntdq" "avxifma"
        "avxneconvert" "avxvnni" "avxvnniint16" "avxvnniint8" "bmi1" "bmi2" "cmpxchg16b" "f16c" "fma" "fxsr" "gfni" "lzcnt"
        "movbe" "pclmulqdq" "popcnt" "rdrand" "rdseed" "rtm" "sha" "sha512" "sm3" "sm4" "sse3" "sse4.1" "sse4.2" "sse4a"
        "ssse3" "tbm" "vaes" "vpclmulqdq" "xsave" "xsavec" "xsaveopt" "xsaves"
    );
    let has = known.iter().filter(|(_, is_there)| *is_there);
    has.map(|(name, _)| (*name).to_owned()).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn instruction_sets() -> BTreeSet<String> {
    BTreeSet::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(criu: &str, processor: &[&str]) -> HostFeatures {
        HostFeatures {
            criu: criu.to_owned(),
            kernel: "6.12.0".to_owned(),
            processor: processor.iter().map(|&name| name.to_owned()).collect(),
        }
    }

    #[test]
    fn a_host_is_fit_for_what_it_wrote() {
        let here = HostFeatures::with("4.2");
        assert_eq!(here.unfit_for(&here), None);
        #[cfg(target_arch = "x86_64")]
        assert!(here.processor.contains("fxsr"), "{here:?}");
    }

    #[test]
    fn fewer_instructions_are_refused_and_more_are_not() {
        let (old, new) = (host("4.2", &["avx"]), host("4.2", &["avx", "avx2"]));
        assert_eq!(new.unfit_for(&old), None);
        assert!(old.unfit_for(&new).unwrap().ends_with("does not have (avx2)"));
        let newest = host("4.2", &["a", "b", "c", "d", "e", "f"]);
        assert!(old.unfit_for(&newest).unwrap().contains("(a, b, c, d and 2 more)"));
    }

    #[test]
    fn an_older_criu_is_refused_and_a_newer_one_is_not() {
        let [old, fixed, new] = ["4.2", "4.2.1", "4.10"].map(|version| host(version, &[]));
        assert_eq!(new.unfit_for(&old), None);
        assert_eq!(old.unfit_for(&fixed), None);
        let why = fixed.unfit_for(&new).unwrap();
        assert!(why.contains("CRIU 4.10") && why.contains("4.2.1"), "{why}");
    }
}
