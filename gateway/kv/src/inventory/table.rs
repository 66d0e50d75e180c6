//! One cache's blocks: engine hash -> (slab entry, copies), twelve bytes a cell, for the ingest thread only.

/// The engine hash in two halves, then entry number << 2 | copies - 1; a last word of 0 is an empty cell.
type Cell = [u32; 3];

#[derive(Default)]
pub(crate) struct Table {
    cells: Vec<Cell>,
    len: usize,
    /// Cells it keeps even when they are empty.
    room: usize,
}

const MIN: usize = 16;
/// Room made ahead at most: what an engine says of its size is its own claim.
const MOST_ROOM: usize = 1 << 22;

#[inline(always)]
fn engine_of(c: &Cell) -> u64 {
    u64::from(c[0]) | u64::from(c[1]) << 32
}

impl Table {
    pub fn with_room(blocks: usize) -> Self {
        let room = if blocks == 0 { 0 } else { blocks.min(MOST_ROOM) * 4 / 3 + MIN };
        Table { cells: vec![[0; 3]; room], len: 0, room }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn bytes(&self) -> usize {
        self.cells.capacity() * size_of::<Cell>()
    }

    /// Order-preserving, so a rehash reads and writes in order.
    #[inline(always)]
    fn home(&self, engine: u64) -> usize {
        let h = (engine ^ (engine >> 32)).wrapping_mul(0x9FB2_1C65_1E98_DF25);
        ((u128::from(h) * self.cells.len() as u128) >> 64) as usize
    }

    #[inline(always)]
    fn next(&self, i: usize) -> usize {
        if i + 1 == self.cells.len() { 0 } else { i + 1 }
    }

    /// Starts loading the line where `engine` would be.
    #[inline(always)]
    pub fn touch(&self, engine: u64) -> u32 {
        self.cells.get(self.home(engine)).map_or(0, |c| c[2])
    }

    /// Where `engine` is, or the empty cell where it would go. Needs at least one empty cell.
    #[inline(always)]
    fn probe(&self, engine: u64) -> (usize, bool) {
        let (lo, hi) = (engine as u32, (engine >> 32) as u32);
        let mut i = self.home(engine);
        loop {
            let c = self.cells[i];
            if c[2] == 0 {
                return (i, false);
            }
            if c[0] == lo && c[1] == hi {
                return (i, true);
            }
            i = self.next(i);
        }
    }

    /// The packed word of `engine`.
    #[inline(always)]
    pub fn get(&self, engine: u64) -> Option<u32> {
        if self.len == 0 {
            return None;
        }
        let (i, found) = self.probe(engine);
        found.then(|| self.cells[i][2])
    }

    pub fn set(&mut self, engine: u64, word: u32) {
        let (i, found) = self.probe(engine);
        if found {
            self.cells[i][2] = word;
        }
    }

    pub fn reserve(&mut self, n: usize) {
        if (self.len + n) * 100 > self.cells.len() * 83 {
            let grown = self.cells.len() * 7 / 5;
            self.resize(grown.max((self.len + n) * 100 / 83 + 1).max(MIN));
        }
    }

    /// The packed word of `engine`, or the cell to [`Table::put`] it in. Needs [`Table::reserve`].
    #[inline(always)]
    pub fn look(&self, engine: u64) -> Result<u32, usize> {
        if self.cells.is_empty() {
            return Err(0);
        }
        let (i, found) = self.probe(engine);
        if found { Ok(self.cells[i][2]) } else { Err(i) }
    }

    #[inline(always)]
    pub fn put(&mut self, cell: usize, engine: u64, word: u32) {
        self.cells[cell] = [engine as u32, (engine >> 32) as u32, word];
        self.len += 1;
    }

    /// Takes `engine` out and closes the gap behind it.
    pub fn remove(&mut self, engine: u64) {
        let (mut hole, found) = self.probe(engine);
        if !found {
            return;
        }
        self.len -= 1;
        let mut i = hole;
        loop {
            i = self.next(i);
            let c = self.cells[i];
            if c[2] == 0 {
                break;
            }
            let home = self.home(engine_of(&c));
            let (from_home, from_hole) = (self.distance(home, i), self.distance(hole, i));
            if from_home >= from_hole {
                self.cells[hole] = c;
                hole = i;
            }
        }
        self.cells[hole] = [0; 3];
    }

    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.cells.len() - from }
    }

    /// Gives memory back when three quarters are empty.
    pub fn shrink(&mut self) {
        if self.cells.len() > self.room.max(4 * MIN) && self.len * 4 < self.cells.len() {
            self.resize((self.len * 100 / 65).max(MIN).max(self.room));
        }
    }

    fn resize(&mut self, cells: usize) {
        let old = std::mem::replace(&mut self.cells, vec![[0; 3]; cells]);
        for c in old.into_iter().filter(|c| c[2] != 0) {
            let (i, _) = self.probe(engine_of(&c));
            self.cells[i] = c;
        }
    }

    /// Renumbers every slab entry.
    pub fn renumber(&mut self, to: &[u32]) {
        for c in self.cells.iter_mut().filter(|c| c[2] != 0) {
            c[2] = to[(c[2] >> 2) as usize] << 2 | c[2] & 3;
        }
    }

    /// Engine hash and packed word of each block.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        self.cells.iter().filter(|c| c[2] != 0).map(|c| (engine_of(c), c[2]))
    }

    /// Takes cells off the end, for a table that is being given up, and writes their entries to `out`, 0 for
    /// none. Returns how many; 0: all gone.
    pub fn drain(&mut self, out: &mut [u32]) -> usize {
        let rest = self.cells.len().saturating_sub(out.len());
        let cells = self.cells.drain(rest..);
        out.iter_mut().zip(cells).map(|(entry, cell)| *entry = cell[2] >> 2).count()
    }
}
