'use strict';
(function () {
  // Elements by tag, attributes and children. Text is only ever set as text.
  function make(tag, attributes, children) {
    var svg = tag === 'svg' || tag === 'path';
    var node = svg ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (k) { node.setAttribute(k, attributes[k]); });
    (children || []).forEach(function (c) { node.append(c); });
    return node;
  }

  // ---- Tables: sort by click or key, filter by text, fold what is long.
  var LONG = 15, SHOWN = 10, FILTERED = 6;

  function table(box) {
    var body = box.querySelector('tbody'), heads = Array.from(box.querySelectorAll('thead th'));
    var rows = Array.from(body.rows), open = rows.length <= LONG, wanted = '';
    var count = make('output', {}), more = make('button', { type: 'button', class: 'more' });

    function show() {
      var seen = 0, fit = 0;
      rows.forEach(function (row) {
        var fits = wanted === '' || row.textContent.toLowerCase().includes(wanted);
        if (fits) fit += 1;
        row.hidden = !(fits && (open || wanted !== '' || seen < SHOWN));
        if (!row.hidden) seen += 1;
      });
      count.textContent = wanted === '' ? '' : fit + ' of ' + rows.length + ' rows';
      more.hidden = rows.length <= LONG || wanted !== '';
      more.textContent = open ? 'Show ' + SHOWN + ' rows' : 'Show all ' + rows.length + ' rows';
      more.setAttribute('aria-expanded', open);
    }

    function sort(column) {
      var head = heads[column], numbers = head.classList.contains('n'), before = head.getAttribute('aria-sort');
      // Numbers begin with the greatest, words with the first.
      var up = before ? before === 'descending' : !numbers;
      heads.forEach(function (h) { h.removeAttribute('aria-sort'); });
      head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      function order(a, b) {
        var p = a.cells[column], q = b.cells[column], m = p.dataset.v, n = q.dataset.v;
        var none = [p, q].map(function (cell) { return numbers ? cell.dataset.v === undefined : cell.textContent === ''; });
        if (none[0] || none[1]) return none[0] - none[1];
        var d = numbers ? m - n : p.textContent.localeCompare(q.textContent, undefined, { numeric: true });
        return up ? d : -d;
      }
      rows.sort(order).forEach(function (row) { body.append(row); });
      show();
    }

    heads.forEach(function (head, column) {
      head.querySelector('button').addEventListener('click', function () { sort(column); });
    });
    if (rows.length >= FILTERED) {
      var field = make('input', { type: 'search', autocomplete: 'off' });
      field.addEventListener('input', function () { wanted = field.value.trim().toLowerCase(); show(); });
      box.querySelector('.bar').insertBefore(make('label', {}, ['Filter ', field]), box.querySelector('.links'));
      box.querySelector('.bar').append(count);
    }
    more.addEventListener('click', function () { open = !open; show(); });
    box.append(more);
    show();
  }

  // ---- The contents follow: the section under the eyes is marked.
  function contents(nav) {
    var links = Array.from(nav.querySelectorAll('a'));
    var parts = links.map(function (a) { return document.getElementById(a.hash.slice(1)); });
    function mark() {
      var at = 0;
      parts.forEach(function (part, i) { if (part.getBoundingClientRect().top < innerHeight * 0.3) at = i; });
      if (scrollY > 0 && innerHeight + scrollY >= document.documentElement.scrollHeight - 2) at = parts.length - 1;
      links.forEach(function (a, i) {
        if ((i === at) === a.hasAttribute('aria-current')) return;
        if (i === at) {
          a.setAttribute('aria-current', 'true');
          // Brings the link into view in its own list, and leaves the page where it is.
          var box = a.getBoundingClientRect(), frame = nav.getBoundingClientRect();
          nav.scrollLeft += Math.min(0, box.left - frame.left - 40) + Math.max(0, box.right - frame.right + 40);
          nav.scrollTop += Math.min(0, box.top - frame.top - 20) + Math.max(0, box.bottom - frame.bottom + 20);
        } else a.removeAttribute('aria-current');
      });
    }
    addEventListener('scroll', mark, { passive: true });
    addEventListener('resize', mark);
    mark();
  }

  // ---- Maps: what is under the pointer in every panel, classes switched in the legend, a rectangle chooses images in all panels.
  var SHAPES = [
    function (g, x, y, r) { g.arc(x, y, r, 0, 7); },
    function (g, x, y, r) { g.rect(x - r, y - r, 2 * r, 2 * r); },
    function (g, x, y, r) { g.moveTo(x, y - 1.25 * r); g.lineTo(x + 1.2 * r, y + r); g.lineTo(x - 1.2 * r, y + r); g.closePath(); },
    function (g, x, y, r) { g.moveTo(x, y - 1.4 * r); g.lineTo(x + 1.4 * r, y); g.lineTo(x, y + 1.4 * r); g.lineTo(x - 1.4 * r, y); g.closePath(); },
    function (g, x, y, r) { g.rect(x - 1.3 * r, y - r / 3, 2.6 * r, r / 1.5); g.rect(x - r / 3, y - 1.3 * r, r / 1.5, 2.6 * r); }
  ];
  var ICONS = ['M6 1a5 5 0 1 0 .01 0z', 'M1 1h10v10H1z', 'M6 0l6 11H0z', 'M6 0l6 6-6 6-6-6z', 'M0 4h4V0h4v4h4v4H8v4H4V8H0z'];
  var NEAR = 14;

  function map(figure) {
    var data = JSON.parse(figure.dataset.map), sprite = figure.querySelector('.sprite'), count = data.labels.length;
    var on = data.classes.map(function () { return true; }), chosen = null, hovered = -1, panels = [];
    var said = make('p', { class: 'chosen', role: 'status' });

    function visible(i) { return on[data.labels[i]]; }
    function at(panel, i) {
      var side = panel.canvas.clientWidth;
      return [panel.xy[2 * i] / 1000 * side, panel.xy[2 * i + 1] / 1000 * side];
    }

    function draw(panel) {
      var canvas = panel.canvas, side = canvas.clientWidth, scale = devicePixelRatio || 1;
      if (!side) return;
      canvas.width = canvas.height = Math.round(side * scale);
      var g = canvas.getContext('2d'), radius = count > 3000 ? 1.6 : 2.4;
      g.scale(scale, scale);
      // Those that were not chosen lie behind.
      [false, true].forEach(function (front) {
        data.classes.forEach(function (_, c) {
          if (!on[c]) return;
          g.beginPath();
          for (var i = 0; i < count; i++) {
            if (data.labels[i] !== c || (chosen ? chosen.has(i) : true) !== front) continue;
            var p = at(panel, i);
            g.moveTo(p[0] + radius, p[1]);
            SHAPES[data.markers[c][1]](g, p[0], p[1], radius);
          }
          g.globalAlpha = front ? 0.85 : 0.12;
          g.fillStyle = data.markers[c][0];
          g.fill();
        });
      });
      g.globalAlpha = 1;
      var ink = getComputedStyle(figure).color;
      if (hovered >= 0) {
        var p = at(panel, hovered);
        g.strokeStyle = ink; g.lineWidth = 2; g.beginPath(); g.arc(p[0], p[1], 7, 0, 7); g.stroke();
      }
      if (panel.brush) {
        var b = panel.brush;
        g.strokeStyle = ink; g.lineWidth = 1; g.setLineDash([4, 3]);
        g.strokeRect(Math.min(b[0], b[2]), Math.min(b[1], b[3]), Math.abs(b[2] - b[0]), Math.abs(b[3] - b[1]));
      }
    }
    function drawAll() { panels.forEach(draw); }

    function near(panel, x, y) {
      var best = -1, least = NEAR * NEAR;
      for (var i = 0; i < count; i++) {
        if (!visible(i)) continue;
        var p = at(panel, i), d = (p[0] - x) * (p[0] - x) + (p[1] - y) * (p[1] - y);
        if (d < least) { least = d; best = i; }
      }
      return best;
    }

    function hover(panel, i) {
      hovered = i;
      panels.forEach(function (other) { other.tip.hidden = other !== panel || i < 0; });
      if (i >= 0) {
        var tip = panel.tip, p = at(panel, i), label = data.labels[i], side = panel.canvas.clientWidth;
        tip.textContent = '';
        tip.append(make('strong', {}, [data.classes[label]]), make('br'));
        if (panel.answers.length) {
          var right = panel.answers[i] === label;
          tip.append((right ? '✓ ' : '✗ ') + 'answer: ' + data.classes[panel.answers[i]], make('br'));
        }
        tip.append('image ' + data.images[i]);
        if (sprite) {
          var s = data.side, shot = make('canvas', { width: s, height: s });
          shot.getContext('2d').drawImage(sprite, i % data.columns * s, Math.floor(i / data.columns) * s, s, s, 0, 0, s, s);
          tip.append(shot);
        }
        tip.style.left = Math.max(0, Math.min(p[0] + 12, side - tip.offsetWidth)) + 'px';
        var below = p[1] + 12 + tip.offsetHeight <= side;
        tip.style.top = panel.canvas.offsetTop + (below ? p[1] + 12 : Math.max(0, p[1] - 12 - tip.offsetHeight)) + 'px';
      }
      drawAll();
    }

    function choose(set) {
      chosen = set && set.size ? set : null;
      if (chosen) {
        var counts = {};
        chosen.forEach(function (i) { counts[data.labels[i]] = (counts[data.labels[i]] || 0) + 1; });
        var most = Object.keys(counts).sort(function (a, b) { return counts[b] - counts[a]; });
        var told = most.slice(0, 6).map(function (c) { return data.classes[c] + ' ' + counts[c]; });
        said.textContent = chosen.size + ' images chosen: ' + told.join(', ') + (most.length > 6 ? ', …' : '') + '. Escape lets them go.';
      } else said.textContent = hint;
      drawAll();
    }

    function step(panel, dx, dy) {
      var from = hovered < 0 ? [panel.canvas.clientWidth / 2, panel.canvas.clientWidth / 2] : at(panel, hovered), best = -1, least = Infinity;
      for (var i = 0; i < count; i++) {
        if (i === hovered || !visible(i)) continue;
        var p = at(panel, i), x = p[0] - from[0], y = p[1] - from[1], ahead = x * dx + y * dy, beside = Math.abs(x * dy) + Math.abs(y * dx);
        if (hovered >= 0 && ahead <= beside) continue;
        var d = hovered < 0 ? x * x + y * y : ahead + 2 * beside;
        if (d < least) { least = d; best = i; }
      }
      if (best >= 0) hover(panel, best);
    }

    data.panels.forEach(function (of) {
      var canvas = make('canvas', { tabindex: 0, role: 'application', 'aria-label': 'Map of ' + of.title + '. Arrow keys go from image to image.' });
      var tip = make('div', { class: 'tip', role: 'status' }), panel = { xy: of.xy, answers: of.answers, canvas: canvas, tip: tip, brush: null };
      tip.hidden = true;
      function place(e) { var box = canvas.getBoundingClientRect(); return [e.clientX - box.left - canvas.clientLeft, e.clientY - box.top - canvas.clientTop]; }
      canvas.addEventListener('pointerdown', function (e) {
        var p = place(e);
        if (e.pointerType === 'touch') { hover(panel, near(panel, p[0], p[1])); return; }
        canvas.setPointerCapture(e.pointerId);
        panel.brush = [p[0], p[1], p[0], p[1]];
      });
      canvas.addEventListener('pointermove', function (e) {
        var p = place(e);
        if (panel.brush) { panel.brush[2] = p[0]; panel.brush[3] = p[1]; drawAll(); return; }
        if (e.pointerType !== 'touch') hover(panel, near(panel, p[0], p[1]));
      });
      canvas.addEventListener('pointerup', function () {
        var b = panel.brush, inside = new Set();
        panel.brush = null;
        if (!b) return;
        for (var i = 0; i < count; i++) {
          var p = at(panel, i);
          if (visible(i) && (p[0] - b[0]) * (p[0] - b[2]) <= 0 && (p[1] - b[1]) * (p[1] - b[3]) <= 0) inside.add(i);
        }
        choose(Math.abs(b[2] - b[0]) + Math.abs(b[3] - b[1]) > 6 ? inside : null);
      });
      canvas.addEventListener('pointerleave', function () { if (!panel.brush) hover(panel, -1); });
      canvas.addEventListener('keydown', function (e) {
        var way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key];
        if (way) { e.preventDefault(); step(panel, way[0], way[1]); }
        if (e.key === 'Escape') { choose(null); hover(panel, -1); }
      });
      panels.push(panel);
      panel.box = make('div', { class: 'panel' }, [make('p', {}, [of.title]), make('p', {}, [of.note]), canvas, tip]);
    });

    var buttons = data.classes.map(function (name, c) {
      var icon = make('svg', { viewBox: '0 0 12 12', 'aria-hidden': 'true' }, [make('path', { d: ICONS[data.markers[c][1]], fill: data.markers[c][0] })]);
      var button = make('button', { type: 'button', 'aria-pressed': 'true' }, [icon, name]);
      button.addEventListener('click', function () { on[c] = !on[c]; legend(); });
      button.addEventListener('dblclick', function () { on = on.map(function (_, k) { return k === c; }); legend(); });
      return button;
    });
    function legend() {
      buttons.forEach(function (b, c) { b.setAttribute('aria-pressed', on[c]); });
      drawAll();
    }
    function all(value, name) {
      var button = make('button', { type: 'button' }, [name]);
      button.addEventListener('click', function () { on = on.map(function () { return value; }); legend(); });
      return button;
    }
    var hint = 'Point at an image to see it in every panel; draw a rectangle to choose images.' +
      (data.by ? ' Answers: ' + data.by + '.' : '') + ' A double click on a class shows it alone.';
    var still = figure.querySelector('.still');
    still.before(make('div', { class: 'panels' }, panels.map(function (p) { return p.box; })),
      make('div', { class: 'legend', role: 'group', 'aria-label': 'Classes' }, [all(true, 'all'), all(false, 'none')].concat(buttons)), said);
    still.hidden = true;
    said.textContent = hint;
    new ResizeObserver(drawAll).observe(figure);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
    drawAll();
  }

  // ---- Figures: a finger has no hover, so a tap on a cell or a point tells what it is.
  function told(still) {
    var said = make('p', { class: 'chosen', role: 'status' });
    still.addEventListener('click', function (e) {
      var title = e.target.querySelector(':scope>title');
      said.textContent = title ? title.textContent : '';
      if (said.textContent) still.after(said); else said.remove();
    });
  }

  document.querySelectorAll('.table').forEach(table);
  document.querySelectorAll('.still').forEach(told);
  document.querySelectorAll('nav').forEach(contents);
  document.querySelectorAll('figure[data-map]').forEach(map);
})();
