//! The memory of snapshots in the driver: made of copies of sandboxes, and copied for each sandbox that is started from it.
//!
//! A copy of a sandbox (`forks`) is used at once or never; this one may be read by another platform, on another kernel, or
//! after a power cut. So its image gets checksums, all of it is written out, and every start checks the image before
//! anything is copied.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;

use model::id::BuildId;
use protocol::node::MemoryInfo;

use super::forks::Source;
use super::state::ContainerDriver;
use crate::cancel::Cancel;
use crate::checkpoint::sums;
use crate::driver::{Driver as _, Fork, StartError};
use crate::kept;
use crate::memories::Memory;

impl ContainerDriver {
    pub(super) fn make_memory(&self, build: &BuildId, copy: &Fork) -> io::Result<u64> {
        sums::write(&self.kept.image(&copy.id, &copy.disk), &Cancel::new()?)?;
        kept::sync(&self.image(&copy.disk))?;
        self.layers.write_out(&copy.disk)?;
        let from = self.kept.path(&copy.id, &copy.disk);
        kept::sync(&from)?;
        let memory = self.memories.take(&from, build, &copy.disk)?;
        self.forks.lock().remove(&copy.disk);
        self.space_of(&memory)
    }

    fn space_of(&self, memory: &Memory) -> io::Result<u64> {
        let disk = fs::metadata(self.image(&memory.disk))?.blocks().saturating_mul(512);
        Ok(sums::space(&memory.image())?.saturating_add(disk))
    }

    pub(super) fn list_memories(&self) -> io::Result<Vec<MemoryInfo>> {
        let found = self.memories.list()?.into_iter().map(|memory| MemoryInfo {
            // It may have been removed meanwhile, or have lost its disk, and is removed then.
            bytes: self.space_of(&memory).unwrap_or(0),
            build: memory.build,
        });
        Ok(found.collect())
    }

    pub(super) fn use_memory(
        &self,
        build: &BuildId,
        to: &Fork,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), StartError> {
        let refused = |why: &str| StartError::Unrestorable(why.to_owned());
        let Some(criu) = &self.criu else {
            return Err(refused(
                "its processes were written by CRIU, which the host does not have, or only too old a version of it",
            ));
        };
        let Some(memory) = self.memories.find(build)? else {
            return Err(refused("the host does not have the memory of the snapshot"));
        };
        let image = memory.image();
        let bytes = match sums::check(&image) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(refused(&error.to_string())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(refused("the image of its processes is missing"));
            }
            checked => checked?,
        };
        if let Some(why) = self.unfit(criu, &image)? {
            return Err(StartError::Unrestorable(why));
        }
        let source = Source {
            disk: &memory.disk,
            image: &image,
            base: memory.base(),
            bytes,
        };
        match self.copy_from(&source, to, is_cancelled) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                Err(refused("the host's disk has no space for a copy of the sandbox"))
            }
            copied => Ok(copied?),
        }
    }

    pub(super) fn drop_memory(&self, build: &BuildId) -> io::Result<()> {
        match self.memories.find(build)? {
            None => Ok(()),
            Some(memory) => {
                self.memories.remove(&memory)?;
                self.remove_disk(&memory.disk)
            }
        }
    }
}
