module @kernel {
  func.func @main(%i0: i32, %x_ref: memref<64x256xf32, #tpu.memory_space<vmem>>, %y_ref: memref<64x256xf32, #tpu.memory_space<vmem>>, %o_ref: memref<64x256xf32, #tpu.memory_space<vmem>>)
      attributes {dimension_semantics = [#tpu.dimension_semantics<parallel>], iteration_bounds = array<i64: 8>, scalar_prefetch = 0 : i64, scratch_operands = 0 : i64, tpu.core_type = #tpu.core_type<tc>, window_params = [
        {transform_indices = @map_0, window_bounds = array<i64: 64, 256>},
        {transform_indices = @map_1, window_bounds = array<i64: 64, 256>},
        {transform_indices = @map_2, window_bounds = array<i64: 64, 256>}]} {
    %c0 = arith.constant 0 : index
    %0 = vector.load %x_ref[%c0, %c0] : memref<64x256xf32, #tpu.memory_space<vmem>>, vector<64x256xf32>
    %1 = vector.load %y_ref[%c0, %c0] : memref<64x256xf32, #tpu.memory_space<vmem>>, vector<64x256xf32>
    %2 = arith.addf %0, %1 : vector<64x256xf32>
    vector.store %2, %o_ref[%c0, %c0] : memref<64x256xf32, #tpu.memory_space<vmem>>, vector<64x256xf32>
    func.return
  }

  func.func @map_0(%i0: i32) -> (i32, i32) {
    %c0 = arith.constant 0 : i32
    func.return %i0, %c0 : i32, i32
  }

  func.func @map_1(%i0: i32) -> (i32, i32) {
    %c0 = arith.constant 0 : i32
    func.return %i0, %c0 : i32, i32
  }

  func.func @map_2(%i0: i32) -> (i32, i32) {
    %c0 = arith.constant 0 : i32
    func.return %i0, %c0 : i32, i32
  }
}
