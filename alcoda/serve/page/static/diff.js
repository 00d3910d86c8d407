// Which tokens of two texts are not shared: outside their longest common subsequence.

const MOST_CELLS = 4e6; // of two texts that are longer, all after the first difference counts as another

const range = (start, n) => new Set(Array.from({ length: n }, (_, i) => start + i));

export function differing(a, b) {
  let same = 0;
  while (same < a.length && same < b.length && a[same] === b[same]) same += 1;
  const n = a.length - same;
  const m = b.length - same;
  if (n * m > MOST_CELLS) return { same, a: range(same, n), b: range(same, m) };
  // table[i][j]: the longest common subsequence of what follows a[same + i] and b[same + j].
  const table = Array.from({ length: n + 1 }, () => new Uint16Array(m + 1));
  for (let i = n - 1; i >= 0; i -= 1) {
    for (let j = m - 1; j >= 0; j -= 1) {
      table[i][j] = a[same + i] === b[same + j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
    }
  }
  const inA = range(same, n);
  const inB = range(same, m);
  let i = 0;
  let j = 0;
  while (i < n && j < m) {
    if (a[same + i] === b[same + j]) {
      inA.delete(same + i);
      inB.delete(same + j);
      i += 1;
      j += 1;
    } else if (table[i + 1][j] >= table[i][j + 1]) i += 1;
    else j += 1;
  }
  return { same, a: inA, b: inB };
}
