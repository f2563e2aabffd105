//! Small pictures of the images that were measured: from the user's own data, and only where they are asked for.

use std::path::Path;

use image::ExtendedColorType;
use image::codecs::jpeg::JpegEncoder;

use crate::data::{self, Picture, Rect, Split, Task};
use crate::error::{Error, Result};
use crate::eval::Common;
use crate::eval::dataset::own_options;
use crate::eval::record::Record;
use crate::report::map::Sprite;
use crate::run::RunFolder;
use crate::system::progress::Progress;

/// The longest side of a picture, in pixels.
const SIDE: usize = 48;
const QUALITY: u8 = 82;
/// Pictures in a row of a sheet.
const COLUMNS: usize = 50;
/// The most pictures a page takes: some ten megabytes.
pub(super) const MOST: usize = 10_000;

/// Where pictures come from.
pub(super) struct Thumbnails<'a> {
    asked: bool,
    common: &'a Common,
    /// What was opened, by dataset, run and task.
    opened: Vec<((String, String, bool), Option<data::Dataset>)>,
    progress: Progress,
    /// Pictures asked for so far.
    wanted: usize,
}

impl<'a> Thumbnails<'a> {
    /// None are shown unless they are asked for.
    pub(super) fn new(asked: bool, common: &'a Common) -> Thumbnails<'a> {
        let progress = Progress::new(common.quiet || !asked, "thumbnails", 0, "pictures");
        Thumbnails { asked, common, opened: vec![], progress, wanted: 0 }
    }

    /// The test images a record is about. `labels` are those of `images`: what is found must have the same classes and labels, or another
    /// set of the same name would be shown.
    pub(super) fn split(&mut self, record: &Record, classes: &[String], images: &[usize], labels: &[usize]) -> Result<Option<Split>> {
        if !self.asked {
            return Ok(None);
        }
        for source in [true, false] {
            let key = (record.dataset.clone(), record.run.clone(), source);
            if !self.opened.iter().any(|(k, _)| *k == key) {
                let dataset = self.open(&key.0, Path::new(&key.1), source);
                self.opened.push((key.clone(), dataset));
            }
            let found = self.opened.iter().find(|(k, _)| *k == key).and_then(|(_, dataset)| dataset.as_ref());
            let same = |d: &&data::Dataset| {
                let label = |i: usize| d.test.labels.get(i).map(|l| *l as usize);
                d.classes == classes && images.iter().zip(labels).all(|(i, l)| label(*i) == Some(*l))
            };
            if let Some(dataset) = found.filter(same) {
                return Ok(Some(dataset.test.clone()));
            }
        }
        self.common.warn(format!(
            "--thumbnails: no pictures of {} for {}: the images that were measured are not found; --data DIR says where they are",
            record.dataset, record.subject
        ));
        Ok(None)
    }

    /// Images side by side as one JPEG.
    pub(super) fn jpeg(&mut self, split: &Split, images: &[usize]) -> Result<Sprite> {
        self.wanted += images.len();
        self.progress.expect(self.wanted);
        let first = split.image(images[0])?;
        let side = first.height.min(first.width).min(SIDE);
        let columns = images.len().min(COLUMNS);
        let (width, height) = (columns * side, images.len().div_ceil(columns) * side);
        let mut sheet = vec![0u8; width * height * 3];
        for (k, &i) in images.iter().enumerate() {
            let tile = small(&split.image(i)?, side);
            for (y, row) in tile.data.chunks_exact(side * 3).enumerate() {
                let at = ((k / columns * side + y) * width + k % columns * side) * 3;
                sheet[at..at + side * 3].copy_from_slice(row);
            }
            self.progress.add(1);
        }
        let mut data = vec![];
        JpegEncoder::new_with_quality(&mut data, QUALITY)
            .encode(&sheet, width as u32, height as u32, ExtendedColorType::Rgb8)
            .map_err(|e| Error::failed(format!("cannot write a thumbnail: {e}")))?;
        Ok(Sprite { data, side, columns })
    }

    fn open(&self, name: &str, run: &Path, source: bool) -> Option<data::Dataset> {
        let own = if source { own_options(name, &RunFolder::at(run)).ok()? } else { toml::Table::new() };
        let task = if source { Task::Source } else { Task::Transfer };
        data::open(name, self.common.data.as_deref(), &data::Options { task, own, ..Default::default() }).ok()
    }
}

/// The middle of an image, square, as small as needed.
fn small(image: &Picture, side: usize) -> Picture<'static> {
    let least = image.height.min(image.width);
    let part = Rect { top: (image.height - least) / 2, left: (image.width - least) / 2, height: least, width: least };
    image.resize_part(part, side, side)
}
