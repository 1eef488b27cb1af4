//! The part of a matrix that one member of a group has, and the way back.

use alloc::{format, vec::Vec};
use core::ops::Range;

use zofo_hal::{Error, Result};

/// Which part of a parameter, or of an adapter's factor, something is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Cut {
    /// All of it.
    #[default]
    Whole,
    /// These rows, one range after the other. A row may come in several ranges: it is then there several times.
    Rows(Vec<Range<usize>>),
    /// These columns of every row, one range after the other.
    Cols(Vec<Range<usize>>),
}

fn count(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

/// Whether `ranges` are 0 to `n`, each once and in order.
fn all(ranges: &[Range<usize>], n: usize) -> bool {
    ranges.iter().try_fold(0, |end, r| (r.start == end).then_some(r.end)) == Some(n)
}

impl Cut {
    /// Rows of a matrix that has `rows`; the whole where they are all of them in order.
    pub fn rows(ranges: Vec<Range<usize>>, rows: usize) -> Self {
        if all(&ranges, rows) { Self::Whole } else { Self::Rows(ranges) }
    }

    /// Columns of a matrix that has `cols`; the whole where they are all of them in order.
    pub fn cols(ranges: Vec<Range<usize>>, cols: usize) -> Self {
        if all(&ranges, cols) { Self::Whole } else { Self::Cols(ranges) }
    }

    /// `[rows, cols]` of this part of a matrix `[rows, cols]`.
    pub fn shape(&self, (rows, cols): (usize, usize)) -> (usize, usize) {
        match self {
            Self::Whole => (rows, cols),
            Self::Rows(ranges) => (count(ranges), cols),
            Self::Cols(ranges) => (rows, count(ranges)),
        }
    }

    /// Where the part's elements are in a row-major matrix `[rows, cols]`, in the order of the part's own.
    pub(super) fn runs(&self, (rows, cols): (usize, usize)) -> Vec<Range<usize>> {
        match self {
            Self::Whole => alloc::vec![0..rows * cols],
            Self::Rows(ranges) => ranges.iter().map(|r| r.start * cols..r.end * cols).collect(),
            Self::Cols(ranges) => (0..rows).flat_map(|row| ranges.iter().map(move |r| row * cols + r.start..row * cols + r.end)).collect(),
        }
    }

    /// That the part lies inside a matrix `[rows, cols]` of `whole` elements, and has `part` elements where that is given.
    fn check(&self, (rows, cols): (usize, usize), whole: usize, part: Option<usize>) -> Result<()> {
        let (limit, ranges) = match self {
            Self::Whole => (0, &[][..]),
            Self::Rows(ranges) => (rows, &ranges[..]),
            Self::Cols(ranges) => (cols, &ranges[..]),
        };
        if let Some(r) = ranges.iter().find(|r| r.start > r.end || r.end > limit) {
            return Err(Error::invalid(format!("{}..{} of the {limit} rows or columns of a matrix", r.start, r.end)));
        }
        let expected = self.shape((rows, cols));
        if rows.checked_mul(cols) != Some(whole) || part.is_some_and(|part| part != expected.0 * expected.1) {
            return Err(Error::invalid(format!(
                "{whole} and {} elements do not make a matrix [{rows}, {cols}] and a part {expected:?} of it",
                part.unwrap_or(expected.0 * expected.1)
            )));
        }
        Ok(())
    }

    /// The part of a row-major matrix of this shape.
    ///
    /// # Errors
    /// `InvalidArgument` where `whole` is of another shape, or the part reaches out of it.
    pub fn take<T: Copy>(&self, shape: (usize, usize), whole: &[T]) -> Result<Vec<T>> {
        self.check(shape, whole.len(), None)?;
        let (rows, cols) = self.shape(shape);
        let mut part = Vec::with_capacity(rows * cols);
        self.runs(shape).into_iter().for_each(|run| part.extend_from_slice(&whole[run]));
        Ok(part)
    }

    /// Writes the part to its places in a row-major matrix of this shape. Of an element that is there several times the last stays.
    ///
    /// # Errors
    /// As [`Cut::take`].
    pub fn put<T: Copy>(&self, shape: (usize, usize), part: &[T], whole: &mut [T]) -> Result<()> {
        self.meet(shape, part, whole, |whole, part| whole.copy_from_slice(part))
    }

    /// Adds the part to what is at its places in a row-major matrix of this shape, ascending: an element that is there several times is
    /// added so often.
    ///
    /// # Errors
    /// As [`Cut::take`].
    pub fn add(&self, shape: (usize, usize), part: &[f32], whole: &mut [f32]) -> Result<()> {
        self.meet(shape, part, whole, |whole, part| whole.iter_mut().zip(part).for_each(|(w, p)| *w += p))
    }

    fn meet<T>(&self, shape: (usize, usize), part: &[T], whole: &mut [T], f: impl Fn(&mut [T], &[T])) -> Result<()> {
        self.check(shape, whole.len(), Some(part.len()))?;
        let mut rest = part;
        for run in self.runs(shape) {
            let (now, later) = rest.split_at(run.len());
            f(&mut whole[run], now);
            rest = later;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are what is meant")]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn parts_are_taken_and_put_back() {
        let whole: Vec<u32> = (0..12).collect();
        let shape = (3, 4);
        for (cut, part) in [
            (Cut::Whole, whole.clone()),
            (Cut::Rows(vec![2..3, 0..1]), vec![8, 9, 10, 11, 0, 1, 2, 3]),
            (Cut::Rows(vec![1..2, 1..2]), vec![4, 5, 6, 7, 4, 5, 6, 7]),
            (Cut::Cols(vec![3..4, 0..2]), vec![3, 0, 1, 7, 4, 5, 11, 8, 9]),
            (Cut::Rows(vec![]), vec![]),
        ] {
            assert_eq!(cut.take(shape, &whole).unwrap(), part, "{cut:?}");
            assert_eq!(cut.shape(shape).0 * cut.shape(shape).1, part.len());
            let mut back = vec![99; 12];
            cut.put(shape, &part, &mut back).unwrap();
            assert!(back.iter().zip(&whole).all(|(b, w)| b == w || *b == 99));
            assert_eq!(cut.take(shape, &back).unwrap(), part);
        }
    }

    #[test]
    fn what_is_there_twice_is_added_twice() {
        let mut whole = [1.0; 4];
        Cut::Rows(vec![1..2, 1..2]).add((2, 2), &[1.0, 2.0, 10.0, 20.0], &mut whole).unwrap();
        assert_eq!(whole, [1.0, 1.0, 12.0, 23.0]);
    }

    #[test]
    fn everything_in_order_is_the_whole() {
        assert_eq!(Cut::rows(vec![0..2, 2..5], 5), Cut::Whole);
        assert_eq!(Cut::cols(vec![0..4], 5), Cut::Cols(vec![0..4]));
        assert_eq!(Cut::rows(vec![2..5, 0..2], 5), Cut::Rows(vec![2..5, 0..2]));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(Cut::Rows(vec![1..3]).take((2, 2), &[0; 4]).is_err());
        assert!(Cut::Cols(vec![1..2]).take((2, 2), &[0; 5]).is_err());
        assert!(Cut::Cols(vec![1..2]).put((2, 2), &[0; 3], &mut [0; 4]).is_err());
        #[expect(clippy::reversed_empty_ranges, reason = "it is what must be refused")]
        let backwards = vec![2..1];
        assert!(Cut::Rows(backwards).take((2, 2), &[0; 4]).is_err());
    }
}
