//! Transforms and the loader, against torchvision's own numbers and by counting.

use std::path::PathBuf;
use std::sync::Arc;

use mcl::data::augment::Crop;
use mcl::data::{Loader, Picture, Pixels, RandAugment, Raw, Rect, Sampling, Split, Transform, sampler};
use mcl::error::Error;
use mcl::rng;
use tch::{IndexOp, Kind, Tensor};

const MEAN: [f64; 3] = [0.5071, 0.4867, 0.4408];
const STD: [f64; 3] = [0.2675, 0.2565, 0.2761];

/// The picture of the golden numbers: (37 y + 91 x + 53 c + 11 y x) mod 256.
fn picture(height: usize, width: usize) -> Picture<'static> {
    let pixel = |y: usize, x: usize| (0..3).map(move |c| ((37 * y + 91 * x + 53 * c + 11 * y * x) % 256) as u8);
    let data: Vec<u8> = (0..height).flat_map(|y| (0..width).flat_map(move |x| pixel(y, x))).collect();
    Picture { height, width, data: data.into() }
}

#[test]
fn resizing_is_pillows_to_the_last_bit() {
    // Image.fromarray(img(h, w)).resize((ow, oh), Image.BILINEAR), Pillow as torchvision 0.28 uses it
    let cases: [(usize, usize, usize, usize, &[u8]); 4] = [
        (7, 5, 3, 2, &[108, 136, 143, 117, 145, 117, 134, 133, 140, 126, 125, 113, 131, 130, 131, 106, 134, 120][..]),
        (
            4,
            3,
            6,
            5,
            &[
                0, 53, 106, 36, 89, 142, 91, 144, 197, 146, 199, 98, 182, 235, 32, 19, 72, 125, 57, 110, 163, 115, 168, 221, 173, 150, 126,
                212, 137, 62, 43, 96, 149, 85, 138, 174, 147, 200, 210, 183, 109, 145, 208, 48, 101, 68, 121, 174, 112, 165, 133, 179, 232,
                72, 118, 145, 113, 77, 87, 140, 93, 146, 199, 140, 142, 144, 211, 136, 61, 129, 130, 132, 74, 127, 180, 111, 164, 217, 161,
                111, 164, 235, 32, 85, 156, 106, 159, 103, 156, 209,
            ][..],
        ),
        (
            9,
            9,
            4,
            9,
            &[
                31, 84, 137, 131, 184, 186, 180, 123, 81, 75, 128, 130, 124, 177, 120, 114, 167, 125, 119, 121, 174, 168, 112, 165, 159,
                65, 118, 106, 159, 205, 166, 112, 97, 113, 141, 138, 154, 101, 85, 96, 149, 127, 143, 90, 143, 153, 137, 134, 151, 79, 125,
                142, 70, 123, 172, 156, 103, 88, 135, 169, 142, 89, 86, 127, 156, 140, 75, 128, 106, 148, 126, 179, 115, 149, 146, 119,
                165, 93, 135, 132, 116, 61, 62, 115, 179, 137, 80, 93, 146, 199, 168, 111, 113, 177, 135, 78, 142, 144, 102, 166, 109, 162,
                79, 132, 76, 140, 193, 99,
            ][..],
        ),
        (
            3,
            8,
            3,
            5,
            &[
                37, 90, 143, 128, 181, 92, 73, 126, 158, 139, 192, 103, 88, 141, 194, 79, 132, 185, 186, 97, 150, 138, 180, 116, 90, 143,
                149, 197, 99, 152, 120, 173, 121, 102, 155, 94, 86, 139, 74, 135, 122, 175, 156, 104, 157,
            ][..],
        ),
    ];
    for (h, w, oh, ow, want) in cases {
        assert_eq!(picture(h, w).resize(oh, ow).data.as_ref(), want, "{h} x {w} -> {oh} x {ow}");
    }
    // F.resized_crop(Image.fromarray(img(9, 11)), 2, 3, 5, 6, [4, 4])
    let part = Rect { top: 2, left: 3, height: 5, width: 6 };
    let want: &[u8] = &[
        122, 135, 68, 117, 113, 166, 171, 89, 142, 158, 67, 120, 142, 102, 115, 141, 111, 117, 140, 126, 120, 139, 69, 122, 79, 132, 145,
        96, 149, 155, 113, 166, 110, 130, 117, 114, 126, 179, 112, 154, 99, 152, 113, 145, 177, 133, 186, 95,
    ];
    assert_eq!(picture(9, 11).resize_part(part, 4, 4).data.as_ref(), want);
}

#[test]
fn centre_crop_is_torchvisions() {
    // CenterCrop(7)(Resize(8)(Image.fromarray(img(13, 10))))
    let want: &[u8] = &[
        128, 140, 172, 159, 118, 118, 151, 109, 109, 109, 111, 139, 165, 85, 136, 153, 88, 136, 144, 75, 128, 129, 173, 190, 106, 119, 100,
        115, 127, 109, 117, 160, 92, 109, 138, 139, 132, 170, 102, 141, 78, 111, 174, 149, 88, 114, 104, 157, 140, 130, 122, 70, 115, 144,
        148, 129, 182, 98, 151, 141, 125, 178, 106, 107, 82, 97, 113, 166, 130, 155, 119, 111, 153, 162, 86, 155, 100, 142, 163, 127, 117,
        116, 169, 97, 74, 84, 125, 164, 116, 127, 122, 147, 185, 177, 99, 105, 135, 163, 85, 100, 125, 138, 111, 164, 96, 75, 126, 179, 75,
        123, 108, 147, 150, 135, 109, 137, 130, 67, 119, 123, 148, 165, 124, 130, 147, 146, 121, 174, 125, 64, 117, 170, 76, 60, 113, 169,
        100, 60, 136, 179, 128, 125, 127, 180, 137, 140, 123,
    ];
    let transform = Transform::centre(7, [0.0; 3], [1.0 / 255.0; 3]);
    assert_eq!(transform.crop, Crop::Centre { resize: 8 });
    let mut out = vec![0.0; transform.floats()];
    transform.apply(&picture(13, 10), &transform.table(), &mut rng::stream(0, "test", &[]), &mut out).unwrap();
    let bytes: Vec<u8> = out.iter().map(|v| v.round() as u8).collect();
    assert_eq!(bytes, want);
}

#[test]
fn normalising_is_torchvisions() {
    // Normalize(MEAN, STD)(ToTensor()(byte))
    let golden = [
        (0u8, [-1.8957008123397827f32, -1.8974658250808716, -1.5965229272842407]),
        (1, [-1.8810406923294067, -1.8821771144866943, -1.5823194980621338]),
        (128, [-0.01921185664832592, 0.059496354311704636, 0.22151684761047363]),
        (255, [1.8426167964935303, 2.001169443130493, 2.025352954864502]),
    ];
    let transform = Transform::plain(1, MEAN, STD);
    for (byte, want) in golden {
        let image = Picture { height: 1, width: 1, data: vec![byte; 3].into() };
        let mut out = [0.0; 3];
        transform.apply(&image, &transform.table(), &mut rng::stream(0, "test", &[]), &mut out).unwrap();
        for c in 0..3 {
            assert!((out[c] - want[c]).abs() < 1e-6, "byte {byte} channel {c}: {} instead of {}", out[c], want[c]);
        }
    }
}

/// 32 x 32, red the row + 1, green the column + 1: a crop tells where it was taken.
fn map_of_itself() -> Picture<'static> {
    let data: Vec<u8> = (0..32u8).flat_map(|y| (0..32u8).flat_map(move |x| [y + 1, x + 1, 200])).collect();
    Picture { height: 32, width: 32, data: data.into() }
}

#[test]
fn crops_and_flips_are_uniform_and_padded_with_zeros() {
    let transform = Transform::pad_crop(32, [0.0; 3], [1.0 / 255.0; 3]);
    let (image, table) = (map_of_itself(), transform.table());
    let mut rng = rng::stream(7, "test", &[]);
    let mut cells = vec![0f64; 9 * 9 * 2];
    let mut out = vec![0f32; 32 * 32 * 3];
    let draws = 16_200;
    for _ in 0..draws {
        transform.apply(&image, &table, &mut rng, &mut out).unwrap();
        let at = |y: usize, x: usize| (out[(y * 32 + x) * 3].round() as i32, out[(y * 32 + x) * 3 + 1].round() as i32);
        // The middle is always inside the image.
        let (flipped, top) = (at(16, 16).1 < at(16, 15).1, at(16, 16).0 - 1 - 16);
        let left = at(16, if flipped { 31 - 16 } else { 16 }).1 - 1 - 16;
        assert!((-4..=4).contains(&top) && (-4..=4).contains(&left), "offset {top}, {left}");
        for y in 0..32 {
            for x in 0..32 {
                let (sy, sx) = (y as i32 + top, (if flipped { 31 - x } else { x }) as i32 + left);
                let inside = (0..32).contains(&sy) && (0..32).contains(&sx);
                assert_eq!(
                    at(y, x),
                    if inside { (sy + 1, sx + 1) } else { (0, 0) },
                    "pixel {y}, {x} of crop {top}, {left}, flipped {flipped}"
                );
            }
        }
        cells[((top + 4) as usize * 9 + (left + 4) as usize) * 2 + flipped as usize] += 1.0;
    }
    let expected = draws as f64 / cells.len() as f64;
    let chi2: f64 = cells.iter().map(|n| (n - expected).powi(2) / expected).sum();
    // 161 degrees of freedom: mean 161, deviation 18; p = 0.001 at 221, and far too even a draw would be as wrong.
    assert!((110.0..221.0).contains(&chi2), "chi-square {chi2}");
}

fn memory(count: usize, side: usize) -> Split {
    let data = (0..count * side * side * 3).map(|i| (i * 31 % 251) as u8).collect();
    Split::new(Pixels::Memory(Arc::new(Raw { height: side, width: side, data })), (0..count).map(|i| (i % 5) as i64).collect())
}

fn bytes(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.contiguous().view([-1])).unwrap()
}

fn epoch(split: &Split, seed: u64, epoch: u64, views: usize, first: usize) -> Vec<(Vec<Vec<f32>>, Vec<i64>, Vec<i64>, u64)> {
    let order = sampler::epoch(&split.labels, Sampling::Shuffled, 8, seed, epoch).unwrap();
    let loader = Loader::new(split, order, Transform::pad_crop(32, MEAN, STD), views, seed, epoch, first);
    let ints = |t: &Tensor| Vec::<i64>::try_from(t).unwrap();
    loader.map(|batch| batch.unwrap()).map(|b| (b.views.iter().map(bytes).collect(), ints(&b.labels), ints(&b.index), b.noise)).collect()
}

#[test]
fn one_seed_gives_identical_bytes_from_any_place_and_other_seeds_do_not() {
    let split = memory(30, 32);
    let whole = epoch(&split, 3, 5, 2, 0);
    assert_eq!(whole.len(), 4);
    assert_eq!(whole, epoch(&split, 3, 5, 2, 0));
    assert_eq!(whole[2..], epoch(&split, 3, 5, 2, 2), "a loader started at batch 2");
    let mut seen: Vec<i64> = whole.iter().flat_map(|b| b.2.clone()).collect();
    seen.sort();
    assert_eq!(seen, (0..30).collect::<Vec<i64>>());
    for (_, labels, index, _) in &whole {
        assert_eq!(*labels, index.iter().map(|i| i % 5).collect::<Vec<i64>>());
    }
    for other in [epoch(&split, 4, 5, 2, 0), epoch(&split, 3, 6, 2, 0)] {
        assert_ne!(whole[0].0, other[0].0);
        assert_ne!(whole[0].3, other[0].3);
    }
    assert_ne!(whole[0].0[0], whole[0].0[1], "two views are two augmentations");
    // A second view does not move the first.
    assert_eq!(whole[1].0[0], epoch(&split, 3, 5, 1, 0)[1].0[0]);
}

#[test]
fn a_transform_can_be_written_down_and_read_back() {
    let plain = Transform::centre(224, MEAN, STD);
    let text = serde_json::to_string(&plain).unwrap();
    assert!(text.starts_with(r#"{"size":224,"crop":{"kind":"centre","resize":256},"flip":false,"mean":[0.5071,"#), "{text}");
    let full = Transform { erase: 0.25, rand_augment: Some(RandAugment::default()), ..Transform::random_resized(224, MEAN, STD) };
    for transform in [plain, full, Transform::pad_crop(32, MEAN, STD)] {
        assert_eq!(serde_json::from_str::<Transform>(&serde_json::to_string(&transform).unwrap()).unwrap(), transform);
    }
}

#[test]
fn batches_are_channels_last_and_eval_keeps_the_order() {
    let split = memory(7, 4);
    let batches: Vec<_> = Loader::eval(&split, 3, Transform::plain(4, [0.0; 3], [1.0 / 255.0; 3])).map(|b| b.unwrap()).collect();
    assert_eq!(batches.iter().map(|b| b.views[0].size()).collect::<Vec<_>>(), [[3, 3, 4, 4], [3, 3, 4, 4], [1, 3, 4, 4]]);
    assert_eq!(batches[0].views[0].stride(), [48, 1, 12, 3]);
    assert_eq!(batches[0].views[0].kind(), Kind::Float);
    let Pixels::Memory(raw) = &split.pixels else { unreachable!() };
    for (k, batch) in batches.iter().enumerate() {
        for i in 0..batch.labels.size()[0] {
            for (y, x, c) in [(0, 0, 0), (1, 2, 1), (3, 3, 2)] {
                let want = raw.data[(3 * k + i as usize) * 48 + (y * 4 + x) * 3 + c];
                let found = batch.views[0].i((i, c as i64, y as i64, x as i64)).double_value(&[]);
                assert!((found - f64::from(want)).abs() < 1e-3, "batch {k} image {i}: {found} instead of {want}");
            }
        }
    }
}

#[test]
fn subsets_share_pixels_and_keep_their_own_places() {
    let split = memory(20, 4);
    let part = split.subset(&[19, 3, 7]).subset(&[2, 0]);
    assert_eq!((part.rows.as_slice(), part.labels.as_slice()), (&[7, 19][..], &[2, 4][..]));
    assert_eq!(part.image(1).unwrap(), split.image(19).unwrap());
    let (Pixels::Memory(a), Pixels::Memory(b)) = (&part.pixels, &split.pixels) else { unreachable!() };
    assert!(Arc::ptr_eq(a, b));
    let batch = Loader::eval(&part, 2, Transform::plain(4, MEAN, STD)).next().unwrap().unwrap();
    assert_eq!(Vec::<i64>::try_from(&batch.index).unwrap(), [0, 1]);
}

#[test]
fn files_and_memory_give_the_same_batches_and_a_broken_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let split = memory(12, 32);
    let paths: Vec<PathBuf> = (0..12).map(|i| dir.path().join(format!("{i}.png"))).collect();
    for (i, path) in paths.iter().enumerate() {
        image::save_buffer(path, &split.image(i).unwrap().data, 32, 32, image::ColorType::Rgb8).unwrap();
    }
    let files = Split::new(Pixels::Files(Arc::new(paths.clone())), split.labels.to_vec());
    assert_eq!(epoch(&split, 1, 1, 2, 0), epoch(&files, 1, 1, 2, 0));
    let small = files.resized(8).unwrap();
    assert_eq!(small.image(5).unwrap(), split.image(5).unwrap().resize(8, 8));

    std::fs::write(&paths[9], vec![0; 500]).unwrap();
    let order = sampler::epoch(&files.labels, Sampling::Shuffled, 4, 0, 0).unwrap();
    let results: Vec<_> = Loader::new(&files, order, Transform::pad_crop(32, MEAN, STD), 1, 0, 0, 0).collect();
    let fault = results.last().unwrap().as_ref().unwrap_err();
    assert!(results[..results.len() - 1].iter().all(|batch| batch.is_ok()));
    assert!(matches!(fault, Error::File { path, .. } if *path == paths[9]), "{fault}");
    assert_eq!(fault.exit_code(), 2);
}

#[test]
fn a_picture_of_the_wrong_size_is_named() {
    let loader = Loader::eval(&memory(3, 8), 2, Transform::plain(32, MEAN, STD));
    let fault = loader.map(|b| b.err()).next().unwrap().unwrap().to_string();
    assert_eq!(fault, "image 0: an image of 8 x 8 pixels where 32 x 32 are expected");
}

#[test]
fn a_loader_may_be_dropped_in_the_middle() {
    let split = memory(64, 32);
    let order = sampler::epoch(&split.labels, Sampling::Shuffled, 2, 0, 0).unwrap();
    let mut loader = Loader::new(&split, order, Transform::pad_crop(32, MEAN, STD), 1, 0, 0, 0);
    assert!(loader.next().unwrap().is_ok());
    assert_eq!(loader.size_hint().1, Some(31));
    drop(loader);
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

#[test]
fn grey_cmyk_and_palette_files_become_rgb() {
    // Pillow: Image.new('CMYK', (8, 8), (200, 40, 0, 30)).save(quality=90); converted to RGB by Pillow it is (49, 190, 225)
    let cmyk = Picture::decode(&hex("ffd8ffee000e41646f626500640000000000ffdb0043000302020302020303030304030304050805050404050a070706080c0a0c0c0b0a0b0b0d0e12100d0e110e0b0b1016101113141515150c0f171816141812141514ffc000140800080008044311004d11005911004b1100ffc4001f0000010501010101010100000000000000000102030405060708090a0bffc400b5100002010303020403050504040000017d01020300041105122131410613516107227114328191a1082342b1c11552d1f02433627282090a161718191a25262728292a3435363738393a434445464748494a535455565758595a636465666768696a737475767778797a838485868788898a92939495969798999aa2a3a4a5a6a7a8a9aab2b3b4b5b6b7b8b9bac2c3c4c5c6c7c8c9cad2d3d4d5d6d7d8d9dae1e2e3e4e5e6e7e8e9eaf1f2f3f4f5f6f7f8f9faffda000e0443004d0059004b00003f00f8f2bee8afd53afd03afffd9")).unwrap();
    assert_eq!((cmyk.height, cmyk.width), (8, 8));
    for (found, want) in cmyk.data.chunks_exact(3).flatten().zip([49, 190, 225].iter().cycle()) {
        assert!(found.abs_diff(*want) <= 3, "{found} instead of {want}");
    }
    // Pillow: a 2 x 2 picture of four colours, quantize(4).save('PNG')
    let palette = Picture::decode(&hex("89504e470d0a1a0a0000000d49484452000000020000000202030000000fd8e5b70000000c504c54458bc0f55b90c5255a8f00356aad7ce3d10000000c49444154789c63b8c0b40100032801835e1a0b2c0000000049454e44ae426082")).unwrap();
    assert_eq!(palette.data.as_ref(), [0, 53, 106, 91, 144, 197, 37, 90, 143, 139, 192, 245]);

    let mut grey = std::io::Cursor::new(vec![]);
    image::GrayImage::from_pixel(8, 8, image::Luma([100])).write_to(&mut grey, image::ImageFormat::Jpeg).unwrap();
    let grey = grey.into_inner();
    let decoded = Picture::decode(&grey).unwrap();
    assert_eq!(decoded.data.len(), 8 * 8 * 3);
    assert!(decoded.data.iter().all(|v| v.abs_diff(100) <= 1));
    // Cut short, the rest would be made up.
    assert_eq!(Picture::decode(&grey[..grey.len() - 4]).unwrap_err(), "a JPEG that ends before its picture does");
    assert_eq!(Picture::decode(&[0; 100]).unwrap_err(), "neither a JPEG nor a PNG file");
}
