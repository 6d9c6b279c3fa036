//! The rootfs of a sandbox: overlays, each on its own read-only layers, with their uppers on one disk.

use serde::{Deserialize, Serialize};

/// Maximum number of overlays: as many descriptors as can be attached to one message.
pub(crate) const OVERLAYS_MAX: usize = 12;
/// Maximum number of layers of an overlay. Kernels that take them as paths accept 255 bytes in total.
pub(crate) const LAYERS_MAX: usize = 16;

/// The root file system of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rootfs {
    /// In the order in which they are mounted: the first at `/`, each other at a directory of those before it.
    pub overlays: Vec<Overlay>,
}

/// One overlay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// Mount point, as an absolute path.
    pub target: String,
    /// The read-only layers, topmost first.
    pub layers: Vec<Layer>,
    /// Directory on the sandbox's disk for its writes: `[a-z0-9]`, unique within the rootfs.
    pub upper: String,
}

/// A read-only directory tree. Layers of built templates belong here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Layer {
    /// The root directory of `base`, in the version that is current at the start. All of a sandbox's layers of `base`
    /// are of one version.
    BaseRoot,
    /// The layer that hides what is specific to the host in `/usr`, of the same version.
    BaseUsr,
    /// The host's `/usr`.
    HostUsr,
}

impl Rootfs {
    /// The template `base`. Two overlays, because overlayfs does not cross mounts: the host's `/usr` is one.
    #[must_use]
    pub fn base() -> Self {
        let overlay = |target: &str, upper: &str, layers: &[Layer]| Overlay {
            target: target.to_owned(),
            layers: layers.to_vec(),
            upper: upper.to_owned(),
        };
        Self {
            overlays: vec![
                overlay("/", "root", &[Layer::BaseRoot]),
                overlay("/usr", "usr", &[Layer::BaseUsr, Layer::HostUsr]),
            ],
        }
    }

    /// Checks whether it can be mounted.
    ///
    /// # Errors
    /// When it cannot, with the reason for the operator.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.overlays.first().is_none_or(|first| first.target != "/") {
            return Err("the first overlay of a file system must be mounted at /".to_owned());
        }
        if self.overlays.len() > OVERLAYS_MAX {
            return Err(format!(
                "{} overlays: a file system has at most {OVERLAYS_MAX}",
                self.overlays.len()
            ));
        }
        for (index, overlay) in self.overlays.iter().enumerate() {
            overlay.check(index == 0)?;
            if self.overlays[..index].iter().any(|other| other.upper == overlay.upper) {
                return Err(format!("two overlays have the upper {}", overlay.upper));
            }
        }
        Ok(())
    }
}

impl Overlay {
    fn check(&self, is_root: bool) -> Result<(), String> {
        let Self { target, layers, upper } = self;
        let is_inside = || {
            let mut parts = target.strip_prefix('/').unwrap_or_default().split('/');
            parts.all(|part| !matches!(part, "" | "." | ".."))
        };
        if !is_root && !is_inside() {
            return Err(format!("invalid target of an overlay: {target}"));
        }
        if layers.is_empty() || layers.len() > LAYERS_MAX {
            return Err(format!(
                "{} layers at {target}: an overlay has 1 to {LAYERS_MAX}",
                layers.len()
            ));
        }
        let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        if upper.is_empty() || !upper.bytes().all(is_name) {
            return Err(format!("invalid name of an upper: {upper}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_file_systems_are_rejected() {
        assert_eq!(Rootfs::base().check(), Ok(()));
        let check = |change: &dyn Fn(&mut Vec<Overlay>), want: &str| {
            let mut rootfs = Rootfs::base();
            change(&mut rootfs.overlays);
            let refused = rootfs.check().unwrap_err();
            assert!(refused.contains(want), "{refused}");
        };
        check(&|overlays| overlays.clear(), "must be mounted at /");
        check(&|overlays| overlays.reverse(), "must be mounted at /");
        check(&|overlays| overlays[0].layers.clear(), "0 layers at /");
        check(
            &|overlays| overlays[1].layers = vec![Layer::HostUsr; LAYERS_MAX + 1],
            "17 layers at /usr",
        );
        check(&|overlays| overlays[1].upper = "root".to_owned(), "two overlays");
        for name in ["", "..", "a/b", "A"] {
            check(&|overlays| overlays[1].upper = name.to_owned(), "name of an upper");
        }
        for target in ["", "/", "usr", "//usr", "/usr/", "/usr/../etc", "/./usr"] {
            check(&|overlays| overlays[1].target = target.to_owned(), "invalid target");
        }
        check(
            &|overlays| overlays.extend((0..OVERLAYS_MAX).map(|_| Rootfs::base().overlays.remove(1))),
            "14 overlays",
        );
    }
}
