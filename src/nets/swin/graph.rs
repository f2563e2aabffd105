//! The operator graph of a Swin. Its numbers of windows, their padding and their shift follow the input's size, without a branch: a map
//! of one window is shifted by 0.

use super::super::graph::Arithmetic::{Least, Minus, Over, Plus, Times};
use super::super::graph::{self, Body, Int, Module, Place, Pointwise, Tree, Value};
use super::{ConvShape, HEADS, NORM_EPS, PATCH, Size, WINDOW, shift, width};

fn norm(place: &Place) -> Module {
    graph::layer_norm(place, NORM_EPS)
}

fn merging(place: &Place) -> Module {
    let merging = Module::new("PatchMerging", |g, x| {
        // A row or a column more where there is an odd number of them.
        let [below, right] = [1, 2].map(|dim| {
            let side = g.size(x, dim);
            up_to_multiple(g, side, 2).1
        });
        let x = g.pad(x, below, right);
        let corners = [(0, 0), (1, 0), (0, 1), (1, 1)].map(|(row, column)| {
            let rows = g.slice(x, 1, row, None, 2);
            g.slice(rows, 2, column, None, 2)
        });
        let x = g.concat(&corners, 3);
        g.calls(["norm", "reduction"], x)
    });
    merging.child("reduction", graph::linear(&place.sub("reduction"))).child("norm", norm(&place.sub("norm")))
}

/// The next multiple of `of`, and how much is missing to it.
fn up_to_multiple(g: &mut Body, side: Int, of: i64) -> (Int, Int) {
    let more = g.reckon(side, Plus, of - 1);
    let times = g.reckon(more, Over, of);
    let whole = g.reckon(times, Times, of);
    (whole, g.reckon(whole, Minus, side))
}

/// Maps [B, h, w, c] as windows [B * windows, n, c]; `rows` and `columns` count the windows.
fn into_windows(g: &mut Body, x: Value, b: Int, [rows, columns]: [Int; 2], c: i64) -> Value {
    let x = g.reshape(x, [b, rows, WINDOW.into(), columns, WINDOW.into(), c.into()]);
    let x = g.permute(x, &[0, 1, 3, 2, 4, 5]);
    g.reshape(x, [(-1).into(), (WINDOW * WINDOW).into(), c.into()])
}

/// -100 between positions of a window that come from different sides of the map, [1, windows, 1, n, n].
fn mask(g: &mut Body, sides: [Int; 2], on: [Int; 2], shift: i64, windows: [Int; 2], like: Value) -> Value {
    let [rows, columns] = [0, 1].map(|dim| {
        // Where nothing is shifted both edges lie at the end, which no position reaches.
        let edges = [WINDOW, shift].map(|width| {
            let back = g.reckon(on[dim], Times, width);
            g.reckon(sides[dim], Minus, back)
        });
        g.steps(sides[dim], &edges, like)
    });
    let rows = g.reshape(rows, [(-1).into(), 1.into()]);
    let rows = g.scale(rows, 3.0);
    let region = g.add(rows, columns);
    let n = WINDOW * WINDOW;
    let region = into_windows(g, region, Int::Is(1), windows, 1);
    let [across, down] = [[1, n], [n, 1]].map(|[a, b]| g.reshape(region, [(-1).into(), a.into(), b.into()]));
    let apart = g.differ(across, down);
    let apart = g.scale(apart, -100.0);
    g.reshape(apart, [1.into(), (-1).into(), 1.into(), n.into(), n.into()])
}

fn attention(place: &Place, heads: i64, shift: i64) -> Module {
    let c = place.sub("proj").tensor("weight").size()[0];
    let (n, each) = (WINDOW * WINDOW, c / heads);
    let attention = Module::new("ShiftedWindowAttention", |g, x| {
        let [b, h, w] = [0, 1, 2].map(|dim| g.size(x, dim));
        let ((ph, below), (pw, right)) = (up_to_multiple(g, h, WINDOW), up_to_multiple(g, w, WINDOW));
        let mut x = g.pad(x, below, right);
        let windows = [ph, pw].map(|side| g.reckon(side, Over, WINDOW));
        // 1 where the map has more than one window and is shifted, else 0; and by how much.
        let shifted = (shift > 0).then(|| {
            windows.map(|count| {
                let others = g.reckon(count, Minus, 1);
                let on = g.reckon(others, Least, 1);
                (on, g.reckon(on, Times, shift))
            })
        });
        if let Some([(_, rows), (_, columns)]) = shifted {
            x = g.rotate(x, &[(1, rows), (2, columns)]);
        }
        let x = into_windows(g, x, b, windows, c);
        let qkv = g.call("qkv", x);
        let qkv = g.reshape(qkv, [(-1).into(), n.into(), 3.into(), heads.into(), each.into()]);
        let qkv = g.permute(qkv, &[2, 0, 3, 1, 4]);
        let [q, k, v] = [0, 1, 2].map(|i| g.select(qkv, 0, i));
        let q = g.scale(q, (each as f64).powf(-0.5));
        let k = g.permute(k, &[0, 1, 3, 2]);
        let scores = g.matmul(q, k);
        let bias = g.lookup("relative_position_bias_table", "relative_position_index");
        let bias = g.reshape(bias, [n.into(), n.into(), heads.into()]);
        let bias = g.permute(bias, &[2, 0, 1]);
        let mut scores = g.add(scores, bias);
        if let Some(shifted) = shifted {
            let mask = mask(g, [ph, pw], shifted.map(|(on, _)| on), shift, windows, scores);
            let all = g.reckon(windows[0], Times, windows[1]);
            scores = g.reshape(scores, [b, all, heads.into(), n.into(), n.into()]);
            scores = g.add(scores, mask);
            scores = g.reshape(scores, [(-1).into(), heads.into(), n.into(), n.into()]);
        }
        let weights = g.softmax(scores, -1);
        let x = g.matmul(weights, v);
        let x = g.permute(x, &[0, 2, 1, 3]);
        let x = g.reshape(x, [(-1).into(), n.into(), c.into()]);
        let x = g.call("proj", x);
        let x = g.reshape(x, [b, windows[0], windows[1], WINDOW.into(), WINDOW.into(), c.into()]);
        let x = g.permute(x, &[0, 1, 3, 2, 4, 5]);
        let mut x = g.reshape(x, [b, ph, pw, c.into()]);
        if let Some([(_, rows), (_, columns)]) = shifted {
            let (rows, columns) = (g.reckon(ph, Minus, rows), g.reckon(pw, Minus, columns));
            x = g.rotate(x, &[(1, rows), (2, columns)]);
        }
        let rows = g.slice(x, 1, 0, Some(h), 1);
        g.slice(rows, 2, 0, Some(w), 1)
    });
    let table = "relative_position_bias_table";
    let attention = attention.parameter(table, Some(place.tensor(table)));
    let attention = attention.buffer("relative_position_index", place.tensor("relative_position_index"));
    attention.child("qkv", graph::linear(&place.sub("qkv"))).child("proj", graph::linear(&place.sub("proj")))
}

fn block(place: &Place, l: usize, at: usize, size: Size) -> Module {
    let mlp = place.sub("mlp");
    let gelu = Module::new("GELU", |g, x| g.point(Pointwise::Gelu, x));
    // torchvision's Dropout layers of rate 0 keep their numbers.
    let drop = || graph::identity("Dropout");
    let mlp = graph::sequential(vec![graph::linear(&mlp.sub(0)), gelu, drop(), graph::linear(&mlp.sub(3)), drop()]);
    let rate = size.drop_path(l, at);
    let drop_path = Module::new("StochasticDepth", |g, x| if rate > 0.0 { g.drop_path(x, rate) } else { x });
    let block = Module::new("SwinTransformerBlock", |g, x| {
        let attended = g.calls(["norm1", "attn", "stochastic_depth"], x);
        let x = g.add(x, attended);
        let mixed = g.calls(["norm2", "mlp", "stochastic_depth"], x);
        g.add(x, mixed)
    });
    block
        .child("norm1", norm(&place.sub("norm1")))
        .child("attn", attention(&place.sub("attn"), HEADS[l], shift(at)))
        .child("stochastic_depth", drop_path)
        .child("norm2", norm(&place.sub("norm2")))
        .child("mlp", mlp)
}

/// As torchvision's classifier, whose `features` has the channels last between its children; the maps have them second.
pub(super) fn graph(place: &Place, size: Size) -> Tree {
    let features = place.sub("features");
    let first = features.sub(0);
    let patches = ConvShape { padding: 0, ..ConvShape::new(3, width(0), PATCH, PATCH) };
    let permute = Module::new("Permute", |g, x| g.permute(x, &[0, 2, 3, 1]));
    let mut modules = vec![graph::sequential(vec![graph::conv(&first.sub(0), patches), permute, norm(&first.sub(2))])];
    for l in 0..size.blocks.len() {
        if l > 0 {
            modules.push(merging(&features.sub(2 * l)));
        }
        let blocks = features.sub(2 * l + 1);
        modules.push(graph::sequential((0..size.blocks[l]).map(|i| block(&blocks.sub(i), l, i, size)).collect()));
    }
    let tree = Tree::default().holder("features", graph::sequential(modules)).channels_last();
    let stage = |tree: Tree, l: usize| tree.call(&format!("features.{}", 2 * l)).call(&format!("features.{}", 2 * l + 1)).map();
    let tree = (0..size.blocks.len()).fold(tree, stage);
    let tree = tree.neck("norm", norm(&place.sub("norm"))).neck("avgpool", graph::avg_pool());
    tree.tail(|g, x| {
        let x = g.call("norm", x);
        let x = g.permute(x, &[0, 3, 1, 2]);
        g.call("avgpool", x)
    })
}
