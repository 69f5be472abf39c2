// The entry point of resizing: weights, and the two passes over an image. Compiled for any x86-64 CPU, so that no compiler fuses
// multiplications and additions of the weights: the results must equal those of Pillow.
#include "resize/resize.h"

#include <emmintrin.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "attention/tasks.h"

namespace {

enum Filter { LANCZOS = 1, BILINEAR = 2, BICUBIC = 3, BOX = 4, HAMMING = 5 };  // Pillow's numbers

double sinc(double x) { return x == 0.0 ? 1.0 : std::sin(x * M_PI) / (x * M_PI); }

// Returns the radius of a filter, in pixels of the smaller image.
double radius(int filter) {
    switch (filter) {
        case LANCZOS: return 3.0;
        case BICUBIC: return 2.0;
        case BOX: return 0.5;
        default: return 1.0;
    }
}

double filtered(int filter, double x) {
    if (filter == BOX) return x > -0.5 && x <= 0.5;
    if (filter == LANCZOS) return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0;
    x = std::fabs(x);
    if (filter == BICUBIC) {  // Keys' cubic convolution, a = -1/2
        if (x < 1.0) return (1.5 * x - 2.5) * x * x + 1;
        return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0.0;
    }
    if (x >= 1.0) return 0.0;
    if (filter == BILINEAR || x == 0.0) return 1.0 - x;
    return sinc(x) * (0.54f + 0.46f * std::cos(x * M_PI));
}

template <class T>
T *room(int64_t count) {
    return static_cast<T *>(std::malloc(size_t(count) * sizeof(T)));
}

// The weights along one axis, and their memory. `is_complete` is false if the memory could not be allocated.
struct Axis {
    int32_t *first = nullptr, *count = nullptr, *weight = nullptr, most = 0;
    double *exact = nullptr;
    bool is_complete = false;

    Axis(int64_t from, int64_t to, int filter) {
        const double scale = double(from) / double(to), wide = scale < 1.0 ? 1.0 : scale, support = radius(filter) * wide;
        most = int32_t(std::ceil(support)) * 2 + 1;
        first = room<int32_t>(to), count = room<int32_t>(to), weight = room<int32_t>(to * most), exact = room<double>(most);
        is_complete = first && count && weight && exact;
        for (int64_t i = 0; is_complete && i < to; i++) one(i, from, (double(i) + 0.5) * scale, support, 1.0 / wide, filter);
    }
    ~Axis() {
        std::free(first), std::free(count), std::free(weight), std::free(exact);
    }
    Axis(const Axis &) = delete;
    Axis &operator=(const Axis &) = delete;

    void one(int64_t i, int64_t from, double center, double support, double step, int filter) {
        const int low = int(center - support + 0.5), high = int(center + support + 0.5);
        first[i] = low < 0 ? 0 : low;
        count[i] = int32_t(high > from ? from : high) - first[i];
        double total = 0.0;
        for (int t = 0; t < count[i]; t++) total += exact[t] = filtered(filter, (t + first[i] - center + 0.5) * step);
        for (int t = 0; t < count[i]; t++) {
            const double share = (total == 0.0 ? exact[t] : exact[t] / total) * (1 << RESIZE_BITS);
            weight[i * most + t] = int32_t(share < 0.0 ? share - 0.5 : share + 0.5);
        }
    }
    ResizeWeights weights() const { return {first, count, weight, most}; }
};

// Transposes 16 rows of 16 bytes.
void transpose(__m128i r[16]) {
    __m128i t[16];
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            t[2 * i] = _mm_unpacklo_epi8(r[i], r[i + 8]);
            t[2 * i + 1] = _mm_unpackhi_epi8(r[i], r[i + 8]);
        }
        std::memcpy(r, t, sizeof t);
    }
}

// Transposes the first 16 of `n` bytes of `rows` rows, `stride` bytes apart, to [bytes, 16]. The last row is repeated if there are fewer
// than 16. The fourth byte of a pixel is dropped if `step` is 4. Returns the end of the output.
uint8_t *gather(const uint8_t *x, int64_t stride, int64_t rows, int64_t n, int step, uint8_t *out) {
    __m128i r[16];
    for (int i = 0; i < 16; i++) {
        const uint8_t *row = x + (i < rows ? i : rows - 1) * stride;
        if (n >= 16) {
            r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(row));
        } else {
            uint8_t few[16] = {};
            std::memcpy(few, row, size_t(n));
            std::memcpy(&r[i], few, 16);
        }
    }
    transpose(r);
    for (int i = 0; i < 16 && i < n; i++) {
        if (step == 4 && i % 4 == 3) continue;
        std::memcpy(out, &r[i], 16);
        out += 16;
    }
    return out;
}

// Transposes [bytes, 16] back to rows: the inverse of `gather`.
void scatter(const uint8_t *x, int64_t n, uint8_t *out, int64_t stride, int64_t rows) {
    __m128i r[16] = {};
    std::memcpy(r, x, size_t(n < 16 ? n : 16) * 16);
    transpose(r);
    for (int64_t i = 0; i < rows; i++) std::memcpy(out + i * stride, &r[i], size_t(n < 16 ? n : 16));
}

// An image, [height, width, step] bytes; the fourth byte of a pixel, if any, is unused.
struct Image {
    const uint8_t *bytes;
    int64_t height, width;
    int step;
};

// Resizes to [height, columns, 3]. This and the functions below return false if memory could not be allocated.
bool resize_width(const ResizeKernel &kernel, const Image &x, int64_t columns, int filter, uint8_t *out) {
    const Axis axis(x.width, columns, filter);
    const int64_t from = x.step * x.width, to = 3 * columns;
    uint8_t *turned = room<uint8_t>((3 * x.width + to) * RESIZE_ROWS), *made = turned + 3 * x.width * RESIZE_ROWS;
    if (!axis.is_complete || turned == nullptr) {
        std::free(turned);
        return false;
    }
    for (int64_t r = 0; r < x.height; r += RESIZE_ROWS) {
        const int64_t few = x.height - r < RESIZE_ROWS ? x.height - r : RESIZE_ROWS;
        uint8_t *end = turned;
        for (int64_t at = 0; at < from; at += 16) end = gather(x.bytes + r * from + at, from, few, from - at, x.step, end);
        kernel.columns(turned, axis.weights(), columns, made);
        for (int64_t at = 0; at < to; at += 16) scatter(made + at * RESIZE_ROWS, to - at, out + r * to + at, to, few);
    }
    std::free(turned);
    return true;
}

// True if rows are resized before columns. Pillow 13 does so where the height shrinks by more than twice as many pixels as the width.
bool is_height_first(int64_t height, int64_t width, int64_t rows, int64_t columns) {
    return rows < height && height - rows > 2 * (width - columns);
}

// Resizes to [rows, width, step].
bool resize_height(const ResizeKernel &kernel, const Image &x, int64_t rows, int filter, uint8_t *out) {
    const Axis axis(x.height, rows, filter);
    const int64_t size = x.width * x.step;
    for (int64_t r = 0; axis.is_complete && r < rows; r++) kernel.row(x.bytes, axis.weights(), r, size, out + r * size);
    return axis.is_complete;
}

// Copies to [height, width, 3].
void copy(const Image &x, uint8_t *out) {
    for (int64_t i = 0; i < x.height * x.width; i++) std::memcpy(out + 3 * i, x.bytes + x.step * i, 3);
}

// Resizes to [rows, columns, 3]. `between` is memory for the result of the first pass.
bool resize(const ResizeKernel &kernel, const Image &x, int64_t rows, int64_t columns, int filter, uint8_t *between, uint8_t *out) {
    if (rows == x.height) return resize_width(kernel, x, columns, filter, out);
    if (columns == x.width || is_height_first(x.height, x.width, rows, columns)) {
        const Image lower = {between, rows, x.width, x.step};
        if (!resize_height(kernel, x, rows, filter, between)) return false;
        if (columns != x.width) return resize_width(kernel, lower, columns, filter, out);
        copy(lower, out);
        return true;
    }
    return resize_width(kernel, x, columns, filter, between) && resize_height(kernel, {between, x.height, columns, 3}, rows, filter, out);
}

}  // namespace

// Resizes [height, width, step] to [rows, columns, 3]. `filter` is Pillow's number, except 0 (nearest). `step` is the bytes of a pixel: 3,
// or 4 of which the last is unused. Returns 0, or 1 if memory could not be allocated.
extern "C" __attribute__((visibility("default"))) int shoal_resize(int set, const uint8_t *x, int64_t height, int64_t width, int step,
                                                                   uint8_t *out, int64_t rows, int64_t columns, int filter) {
    const Image image = {x, height, width, step};
    if (rows == height && columns == width) {
        copy(image, out);
        return 0;
    }
    uint8_t *between = room<uint8_t>(step * rows * width > 3 * height * columns ? step * rows * width : 3 * height * columns);
    const ResizeKernel &kernel = set >= AVX512 ? avx512_resize : avx2_resize;
    const bool is_done = between != nullptr && resize(kernel, image, rows, columns, filter, between, out);
    std::free(between);
    return !is_done;
}
