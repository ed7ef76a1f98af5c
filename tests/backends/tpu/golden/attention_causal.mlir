module @attention {
  func.func @main(%i0: i32, %i1: i32, %i2: i32, %ref: memref<1x128x128xf32, #tpu.memory_space<vmem>>, %ref_1: memref<1x128x128xf32, #tpu.memory_space<vmem>>, %ref_2: memref<1x128x128xf32, #tpu.memory_space<vmem>>, %ref_3: memref<1x128x128xf32, #tpu.memory_space<vmem>>, %ref_4: memref<128x128xf32, #tpu.memory_space<vmem>>, %ref_5: memref<128x128xf32, #tpu.memory_space<vmem>>, %ref_6: memref<128x128xf32, #tpu.memory_space<vmem>>)
      attributes {dimension_semantics = [#tpu.dimension_semantics<arbitrary>, #tpu.dimension_semantics<arbitrary>, #tpu.dimension_semantics<arbitrary>], iteration_bounds = array<i64: 4, 4, 4>, scalar_prefetch = 0 : i64, scratch_operands = 3 : i64, tpu.core_type = #tpu.core_type<tc>, window_params = [
        {transform_indices = @map_0, window_bounds = array<i64: 1, 128, 128>},
        {transform_indices = @map_1, window_bounds = array<i64: 1, 128, 128>},
        {transform_indices = @map_2, window_bounds = array<i64: 1, 128, 128>},
        {transform_indices = @map_3, window_bounds = array<i64: 1, 128, 128>}]} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant dense<0xFF800000> : vector<128x128xf32>
    %c2 = arith.constant 0 : index
    %c3 = arith.constant dense<0.0> : vector<128x128xf32>
    %c4 = arith.constant dense<0.0883883461356163> : vector<128x128xf32>
    %c5 = arith.constant 128 : i32
    %c6 = arith.constant dense<-1.0000000150474662e+30> : vector<128x128xf32>
    %c7 = arith.constant dense<0xFF800000> : vector<128xf32>
    %c8 = arith.constant dense<0.0> : vector<128xf32>
    %c9 = arith.constant 3 : i32
    %0 = arith.cmpi eq, %i2, %c0 : i32
    %1 = arith.extui %0 : i1 to i32
    %2 = arith.cmpi sgt, %1, %c0 : i32
    scf.if %2 {
      vector.store %c1, %ref_4[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      vector.store %c3, %ref_5[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      vector.store %c3, %ref_6[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
    }
    %3 = arith.cmpi sle, %i2, %i1 : i32
    %4 = arith.extui %3 : i1 to i32
    %5 = arith.cmpi sgt, %4, %c0 : i32
    scf.if %5 {
      %6 = vector.load %ref[%c2, %c2, %c2] : memref<1x128x128xf32, #tpu.memory_space<vmem>>, vector<1x128x128xf32>
      %7 = vector.shape_cast %6 : vector<1x128x128xf32> to vector<128x128xf32>
      %8 = vector.load %ref_1[%c2, %c2, %c2] : memref<1x128x128xf32, #tpu.memory_space<vmem>>, vector<1x128x128xf32>
      %9 = vector.shape_cast %8 : vector<1x128x128xf32> to vector<128x128xf32>
      %10 = tpu.matmul %7, %9, %c3 {dimension_numbers = #tpu.dot_dimension_numbers<[1], [1], [0], [0], [0, 0, 1, 0], [], []>, transpose_lhs_hint = false} : vector<128x128xf32>, vector<128x128xf32>, vector<128x128xf32> -> vector<128x128xf32>
      %11 = arith.mulf %10, %c4 : vector<128x128xf32>
      %12 = arith.muli %i1, %c5 : i32
      %13 = tpu.iota {dimensions = array<i32: 0>} : vector<128x128xi32>
      %14 = vector.broadcast %12 : i32 to vector<128x128xi32>
      %15 = arith.addi %14, %13 : vector<128x128xi32>
      %16 = arith.muli %i2, %c5 : i32
      %17 = tpu.iota {dimensions = array<i32: 1>} : vector<128x128xi32>
      %18 = vector.broadcast %16 : i32 to vector<128x128xi32>
      %19 = arith.addi %18, %17 : vector<128x128xi32>
      %20 = arith.cmpi sle, %19, %15 : vector<128x128xi32>
      %21 = arith.select %20, %11, %c6 : vector<128x128xi1>, vector<128x128xf32>
      %22 = vector.load %ref_4[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      %23 = vector.multi_reduction <maximumf>, %21, %c7 [1] : vector<128x128xf32> to vector<128xf32>
      %24 = vector.shape_cast %23 : vector<128xf32> to vector<128x1xf32>
      %25 = vector.broadcast %24 : vector<128x1xf32> to vector<128x128xf32>
      %26 = arith.maximumf %22, %25 : vector<128x128xf32>
      %27 = arith.subf %21, %26 : vector<128x128xf32>
      %28 = math.exp %27 : vector<128x128xf32>
      %29 = arith.subf %22, %26 : vector<128x128xf32>
      %30 = math.exp %29 : vector<128x128xf32>
      %31 = vector.load %ref_5[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      %32 = arith.mulf %30, %31 : vector<128x128xf32>
      %33 = vector.multi_reduction <add>, %28, %c8 [1] : vector<128x128xf32> to vector<128xf32>
      %34 = vector.shape_cast %33 : vector<128xf32> to vector<128x1xf32>
      %35 = vector.broadcast %34 : vector<128x1xf32> to vector<128x128xf32>
      %36 = arith.addf %32, %35 : vector<128x128xf32>
      vector.store %36, %ref_5[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      %37 = vector.load %ref_2[%c2, %c2, %c2] : memref<1x128x128xf32, #tpu.memory_space<vmem>>, vector<1x128x128xf32>
      %38 = vector.shape_cast %37 : vector<1x128x128xf32> to vector<128x128xf32>
      %39 = tpu.matmul %28, %38, %c3 {dimension_numbers = #tpu.dot_dimension_numbers<[1], [0], [0], [1], [0, 0, 1, 1], [], []>, transpose_lhs_hint = false} : vector<128x128xf32>, vector<128x128xf32>, vector<128x128xf32> -> vector<128x128xf32>
      %40 = vector.load %ref_6[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      %41 = arith.mulf %30, %40 : vector<128x128xf32>
      %42 = arith.addf %41, %39 : vector<128x128xf32>
      vector.store %42, %ref_6[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      vector.store %26, %ref_4[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
    }
    %43 = arith.cmpi eq, %i2, %c9 : i32
    %44 = arith.extui %43 : i1 to i32
    %45 = arith.cmpi sgt, %44, %c0 : i32
    scf.if %45 {
      %46 = vector.load %ref_6[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      %47 = vector.load %ref_5[%c2, %c2] : memref<128x128xf32, #tpu.memory_space<vmem>>, vector<128x128xf32>
      %48 = arith.divf %46, %47 : vector<128x128xf32>
      %49 = vector.shape_cast %48 : vector<128x128xf32> to vector<1x128x128xf32>
      vector.store %49, %ref_3[%c2, %c2, %c2] : memref<1x128x128xf32, #tpu.memory_space<vmem>>, vector<1x128x128xf32>
    }
    func.return
  }

  func.func @map_0(%i0: i32, %i1: i32, %i2: i32) -> (i32, i32, i32) {
    %c0 = arith.constant 0 : i32
    func.return %i0, %i1, %c0 : i32, i32, i32
  }

  func.func @map_1(%i0: i32, %i1: i32, %i2: i32) -> (i32, i32, i32) {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %0 = arith.addi %i1, %c1 : i32
    %1 = arith.subi %0, %c1 : i32
    %2 = arith.minsi %i2, %1 : i32
    func.return %i0, %2, %c0 : i32, i32, i32
  }

  func.func @map_2(%i0: i32, %i1: i32, %i2: i32) -> (i32, i32, i32) {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %0 = arith.addi %i1, %c1 : i32
    %1 = arith.subi %0, %c1 : i32
    %2 = arith.minsi %i2, %1 : i32
    func.return %i0, %2, %c0 : i32, i32, i32
  }

  func.func @map_3(%i0: i32, %i1: i32, %i2: i32) -> (i32, i32, i32) {
    %c0 = arith.constant 0 : i32
    func.return %i0, %i1, %c0 : i32, i32, i32
  }
}
