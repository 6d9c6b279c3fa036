//! The files of recipes that come with the program: a build of one needs no upload.
//!
//! They are stored as if the team had uploaded them, so that they count as what it uploads does, builds find them as they find others, and
//! layers are those of `ringfence template add`.

use std::collections::BTreeMap;

use bytes::Bytes;
use model::id::TeamId;
use recipes::Carried;

use super::files::{BuildFiles, FileError};

impl BuildFiles {
    /// Stores what the Dockerfile of a recipe copies, unless the team has it. Returns the hashes by the lines that copy.
    pub(crate) async fn store_recipe(
        &self,
        team: &TeamId,
        recipe: &Carried,
    ) -> Result<BTreeMap<usize, String>, FileError> {
        let archives = recipe.archives().map_err(std::io::Error::other)?;
        let mut hashes = BTreeMap::new();
        for (line, archive) in archives {
            if !self.is_present(team, &archive.hash).await {
                let size = u64::try_from(archive.bytes.len()).unwrap_or(u64::MAX);
                let upload = self.begin(team, &archive.hash, Some(size)).await?;
                let upload = self.write(upload, Bytes::from(archive.bytes)).await?;
                self.keep(team, &archive.hash, upload).await?;
            }
            hashes.insert(line, archive.hash);
        }
        Ok(hashes)
    }
}
