//! The rootfs of a sandbox: overlays, each on its own read-only layers, with their uppers on one disk.

use model::id::LayerId;
use protocol::node::{Image, LayerStack};
use serde::{Deserialize, Serialize};

/// Maximum number of overlays: as many descriptors as can be attached to one message.
pub(crate) const OVERLAYS_MAX: usize = 12;
/// Maximum number of layers of an overlay. Kernels that take them as paths accept 255 bytes in total.
pub(crate) const LAYERS_MAX: usize = 16;

/// The root file system of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rootfs {
    /// The overlays, in the order in which they are mounted: the first at `/`, each other at a directory of those
    /// before it.
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

/// A read-only directory tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Layer {
    /// The root directory of `base`, in the version that is current at the start. All of a sandbox's layers of `base`
    /// are of one version.
    BaseRoot,
    /// The layer that hides what is specific to the host in `/usr`, of the same version.
    BaseUsr,
    /// The host's `/usr`, or the copy of it that the version of `base` has.
    HostUsr,
    /// One directory of a stored layer.
    Stored {
        /// The layer.
        layer: LayerId,
        /// The directory.
        part: Part,
    },
    /// One directory of the skeleton of file systems without `base`.
    Skeleton(Skeleton),
}

/// A directory of a stored layer, named after the upper of `base` that it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Part {
    /// The root.
    Root,
    /// `/usr`, in layers above `base`.
    Usr,
}

impl Part {
    /// Name of the directory, and of the upper.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Root => "root",
            Self::Usr => "usr",
        }
    }
}

/// A directory of the skeleton (see `skeleton.rs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Skeleton {
    /// What every sandbox needs at fixed places; above all layers of an image, so that none of them can hide it.
    Top,
    /// What images may replace; below all layers of an image.
    Bottom,
    /// An empty directory.
    Empty,
}

/// Upper of the directory that [`Rootfs::import`] adds.
const IMAGE: &str = "image";

/// An upper that becomes a part of a stored layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Source {
    pub(crate) upper: String,
    pub(crate) part: Part,
    /// The stored layers below the overlay, topmost first.
    pub(crate) layers: Vec<LayerId>,
    /// Whether anything may lie below the result, so that it has to say what is deleted.
    pub(crate) has_below: bool,
}

impl Rootfs {
    /// The template `base`. Two overlays, because overlayfs does not cross mounts: the host's `/usr` is one.
    #[must_use]
    pub fn base() -> Self {
        Self::above_base(&[])
    }

    /// Stored layers, lowest first, above `base`.
    #[must_use]
    pub fn above_base(layers: &[LayerId]) -> Self {
        Self {
            overlays: vec![
                overlay("/", Part::Root, layers, [], [Layer::BaseRoot]),
                overlay("/usr", Part::Usr, layers, [], [Layer::BaseUsr, Layer::HostUsr]),
            ],
        }
    }

    /// Stored layers, lowest first, above an almost empty file system. Works with none, too: then no program is in the
    /// sandbox but its agent.
    #[must_use]
    pub fn without_base(layers: &[LayerId]) -> Self {
        let (top, bottom) = (Layer::Skeleton(Skeleton::Top), Layer::Skeleton(Skeleton::Bottom));
        Self {
            overlays: vec![overlay("/", Part::Root, layers, [top], [bottom])],
        }
    }

    /// `base` with an empty directory at `/mnt`, which alone becomes a layer.
    #[must_use]
    pub fn import() -> Self {
        let mut rootfs = Self::base();
        rootfs.overlays.push(Overlay {
            target: "/mnt".to_owned(),
            layers: vec![Layer::Skeleton(Skeleton::Empty)],
            upper: IMAGE.to_owned(),
        });
        rootfs
    }

    /// `base` with two file systems: `to` at `/mnt`, which alone becomes a layer, and `from` at `/media`.
    #[must_use]
    pub fn copy(to: &LayerStack, from: &LayerStack) -> Self {
        let of = |stack: &LayerStack| {
            if stack.base {
                Self::above_base(&stack.layers)
            } else {
                Self::without_base(&stack.layers)
            }
        };
        let mut rootfs = Self::base();
        for overlay in &mut rootfs.overlays {
            overlay.upper.insert_str(0, "host");
        }
        for (stack, at, prefix) in [(to, "/mnt", ""), (from, "/media", "from")] {
            rootfs
                .overlays
                .extend(of(stack).overlays.into_iter().map(|overlay| Overlay {
                    target: format!("{at}{}", overlay.target.trim_end_matches('/')),
                    upper: format!("{prefix}{}", overlay.upper),
                    ..overlay
                }));
        }
        rootfs
    }

    /// The image that it is made of, if it is made of stored layers alone, or of none.
    #[must_use]
    pub fn image(&self) -> Option<Image> {
        let of_root = self.stored().filter(|(_, part)| *part == Part::Root);
        let mut layers: Vec<LayerId> = of_root.map(|(layer, _)| layer.clone()).collect();
        layers.reverse();
        match self {
            same if layers.is_empty() && *same == Self::base() => Some(Image::Base),
            same if *same == Self::above_base(&layers) => Some(Image::Layers { base: true, layers }),
            same if *same == Self::without_base(&layers) => Some(Image::Layers { base: false, layers }),
            _ => None,
        }
    }

    /// The stored layers and their directories that it consists of.
    pub(crate) fn stored(&self) -> impl Iterator<Item = (&LayerId, Part)> {
        let layers = self.overlays.iter().flat_map(|overlay| &overlay.layers);
        layers.filter_map(|layer| match layer {
            Layer::Stored { layer, part } => Some((layer, *part)),
            _ => None,
        })
    }

    /// Whether a part of it is a version of `base`.
    pub(crate) fn has_base(&self) -> bool {
        let mut layers = self.overlays.iter().flat_map(|overlay| &overlay.layers);
        layers.any(|layer| matches!(layer, Layer::BaseRoot | Layer::BaseUsr))
    }

    /// What of a sandbox with this file system becomes a layer; with `merge` together with its stored layers.
    pub(crate) fn sources(&self, merge: bool) -> Vec<Source> {
        let is_import = self.overlays.iter().any(|overlay| overlay.upper == IMAGE);
        let parts = [Part::Root, Part::Usr];
        let sources = self.overlays.iter().filter_map(|overlay| {
            let part = if is_import {
                (overlay.upper == IMAGE).then_some(Part::Root)?
            } else {
                parts.into_iter().find(|part| part.as_str() == overlay.upper)?
            };
            let layers = overlay.layers.iter().filter_map(|layer| match layer {
                Layer::Stored { layer, .. } if merge => Some(layer.clone()),
                _ => None,
            });
            Some(Source {
                upper: overlay.upper.clone(),
                part,
                layers: layers.collect(),
                has_below: !is_import,
            })
        });
        sources.collect()
    }

    /// Checks whether the file system can be mounted.
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

/// The overlay of a part at `target`: `top`, the stored layers, which are the lowest first, and `bottom`.
fn overlay<const T: usize, const B: usize>(
    target: &str,
    part: Part,
    stored: &[LayerId],
    top: [Layer; T],
    bottom: [Layer; B],
) -> Overlay {
    let stored = stored.iter().rev().map(|layer| Layer::Stored {
        layer: layer.clone(),
        part,
    });
    Overlay {
        target: target.to_owned(),
        layers: top.into_iter().chain(stored).chain(bottom).collect(),
        upper: part.as_str().to_owned(),
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

    fn layer(number: u8) -> LayerId {
        LayerId::from_hash(&[number; 32])
    }

    #[test]
    fn stored_layers_are_between_the_skeleton_or_above_base() {
        let layers = [layer(1), layer(2)];
        let stored = |number, part| Layer::Stored {
            layer: layer(number),
            part,
        };
        let image = Rootfs::without_base(&layers);
        let want = [
            Layer::Skeleton(Skeleton::Top),
            stored(2, Part::Root),
            stored(1, Part::Root),
            Layer::Skeleton(Skeleton::Bottom),
        ];
        assert_eq!(image.overlays[0].layers, want);
        assert!(!image.has_base());
        let above = Rootfs::above_base(&layers);
        let want = [
            stored(2, Part::Usr),
            stored(1, Part::Usr),
            Layer::BaseUsr,
            Layer::HostUsr,
        ];
        assert_eq!(above.overlays[1].layers, want);
        assert_eq!(above.stored().count(), 4);
        let of = |base| {
            let layers = layers.to_vec();
            Some(Image::Layers { base, layers })
        };
        assert_eq!((above.image(), image.image()), (of(true), of(false)));
        assert_eq!(Rootfs::base().image(), Some(Image::Base));
        assert_eq!(Rootfs::import().image(), None);
        let most = Rootfs::above_base(&vec![layer(1); protocol::node::Image::LAYERS_MAX]);
        assert_eq!(most.check(), Ok(()));
        let most = Rootfs::without_base(&vec![layer(1); protocol::node::Image::LAYERS_MAX]);
        assert_eq!(most.check(), Ok(()));
    }

    fn stack(base: bool, layers: &[u8]) -> LayerStack {
        LayerStack {
            base,
            layers: layers.iter().copied().map(layer).collect(),
        }
    }

    #[test]
    fn a_copy_has_both_file_systems_beside_base() {
        let rootfs = Rootfs::copy(&stack(true, &[1]), &stack(false, &[2]));
        assert_eq!(rootfs.check(), Ok(()));
        let targets: Vec<&str> = rootfs.overlays.iter().map(|overlay| overlay.target.as_str()).collect();
        assert_eq!(targets, ["/", "/usr", "/mnt", "/mnt/usr", "/media"]);
        assert_eq!(rootfs.stored().count(), 3);
    }

    #[test]
    fn what_becomes_a_layer() {
        let source = |upper: &str, part, layers: &[u8], has_below| Source {
            upper: upper.to_owned(),
            part,
            layers: layers.iter().copied().map(layer).collect(),
            has_below,
        };
        let layers = [layer(1), layer(2)];
        for (rootfs, merge, want) in [
            (
                Rootfs::base(),
                true,
                vec![
                    source("root", Part::Root, &[], true),
                    source("usr", Part::Usr, &[], true),
                ],
            ),
            (
                Rootfs::above_base(&layers),
                true,
                vec![
                    source("root", Part::Root, &[2, 1], true),
                    source("usr", Part::Usr, &[2, 1], true),
                ],
            ),
            (
                Rootfs::without_base(&layers),
                false,
                vec![source("root", Part::Root, &[], true)],
            ),
            (Rootfs::import(), false, vec![source("image", Part::Root, &[], false)]),
            (
                Rootfs::copy(&stack(false, &[1]), &stack(true, &[2])),
                true,
                vec![source("root", Part::Root, &[1], true)],
            ),
            (
                Rootfs::copy(&stack(true, &[1]), &stack(true, &[])),
                true,
                vec![
                    source("root", Part::Root, &[1], true),
                    source("usr", Part::Usr, &[1], true),
                ],
            ),
        ] {
            assert_eq!(rootfs.sources(merge), want);
        }
    }

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
